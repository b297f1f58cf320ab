"""The page of the dataset report: one file, no script, nothing fetched."""

TEMPLATE = """\
{% extends "base" %}
{% from "parts" import picture, number %}
{%- macro percent(share) -%}{{ "{:.1f}".format(100 * share) }} %{%- endmacro -%}
{% block title %}{{ manifest.archive }} · {{ manifest.fingerprint[:12] }}{% endblock %}
{% block body %}
<header>
<h1>{{ manifest.archive }}</h1>
<div class="soft">Dataset report</div>
<dl>
<div><dt>Task</dt><dd>{{ manifest.task.replace("_", "-") }}</dd></div>
<div><dt>Classes</dt><dd>{{ number(manifest.class_names|length) }}</dd></div>
<div><dt>Samples</dt><dd>{{ number(splits|sum(attribute="rows")) }}</dd></div>
<div><dt>Left out</dt><dd>{{ number(rejected_total) }}</dd></div>
<div><dt>Fingerprint</dt><dd><code>{{ manifest.fingerprint[:12] }}</code></dd></div>
<div><dt>Source</dt><dd><code>{{ manifest.source_fingerprint[:12] }}</code></dd></div>
{% for name, value in manifest.settings.items() %}
<div><dt>{{ name.replace("_", " ").capitalize().replace("mib", "MiB") }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
</header>

<section id="splits">
<h2>Splits</h2>
<div class="wide"><table>
<thead><tr><th>Split</th><th class="n">Samples</th><th class="n">Share</th><th class="n">Shards</th>
<th class="n">Row groups</th><th class="n">Size</th></tr></thead>
<tbody>
{% for split in splits %}
<tr><th>{{ split.name }}</th><td class="n">{{ number(split.rows) }}</td><td class="n">{{ percent(split.share) }}</td>
<td class="n">{{ number(split.shards) }}</td><td class="n">{{ number(split.row_groups) }}</td>
<td class="n">{{ split.size }}</td></tr>
{% endfor %}
</tbody></table></div>
<h3>Images of one sample</h3>
<div class="wide"><table>
<thead><tr><th>Group</th><th>Height &times; width &times; bands</th><th>Type</th><th>Bands</th></tr></thead>
<tbody>
{% for group in manifest.groups %}
<tr><th>{{ group.name }}</th><td>{{ group.shape[0] }} &times; {{ group.shape[1] }} &times; {{ group.shape[2] }}</td>
<td>{{ group.dtype }}</td><td class="list">{{ group.bands|join(", ") }}</td></tr>
{% endfor %}
</tbody></table></div>
</section>

<section id="classes">
<h2>Classes</h2>
<p class="soft">Samples with each class and their share of the split, by frequency in the training split.
The number in front is the class index.
{% if classes.hidden %}The {{ classes.rows|length // 2 }} most and the {{ classes.rows|length // 2 }} least frequent of
{{ number(manifest.class_names|length) }} classes.{% endif %}</p>
{% if classes.absent %}
<p class="warn">{{ number(classes.absent) }} of {{ number(manifest.class_names|length) }} classes have no training
sample.</p>
{% endif %}
<div class="wide"><table class="classes">
<thead><tr><th class="n">#</th><th>Class</th>{% for split in splits %}<th>{{ split.name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in classes.rows %}
{% if classes.hidden and loop.index0 == classes.rows|length // 2 %}
<tr class="gap"><th colspan="{{ 2 + splits|length }}">{{ number(classes.hidden) }} classes between</th></tr>
{% endif %}
<tr><th class="n soft">{{ row.index }}</th><th class="name">{{ row.name }}</th>
{% for cell in row.cells %}
<td style="--width: {{ "{:.2f}".format(100 * cell.width) }}%">{{ number(cell.count) }}
<span class="soft">{{ percent(cell.share) }}</span></td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>

{% if metadata %}
<section id="metadata">
<h2>Where and when</h2>
<p class="soft">Samples and their share of the split, as far as the archive says. Seasons are meteorological: winter is
December to February.</p>
{% for table in metadata %}
<div class="wide"><table class="counts">
<thead><tr><th>{{ table.title }}</th>{% for split in splits %}<th class="n">{{ split.name }}</th>{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr><th>{{ row.name }}</th>
{% for cell in row.cells %}
<td class="n">{{ number(cell.count) }} <span class="soft">{{ percent(cell.share) }}</span></td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% endfor %}
</section>
{% endif %}

{% if balance %}
<section id="balance">
<h2>Class balance</h2>
<p class="soft">Training samples per class: median {{ number(balance.median) }}; most “{{ balance.most.name }}”
({{ number(balance.most.count) }}), least “{{ balance.least.name }}” ({{ number(balance.least.count) }}).</p>
<div class="wide">{{ picture(balance_plot, "Training samples per class, most frequent first") }}</div>
</section>
{% endif %}
{% if matrix %}
<section id="cooccurrence">
<h2>Classes that occur together</h2>
<p class="soft">Of the training samples with the class of the row, the percentage that also have the class of the
column. {% if classes.hidden %}The same {{ classes.rows|length }} classes as above.{% endif %}</p>
<div class="wide"><table class="matrix{{ ' dense' if matrix|length > 24 }}">
<thead><tr><th></th>{% for row in matrix %}<th><span title="{{ row.name }}">{{ row.short }}</span></th>{% endfor %}
</tr></thead>
<tbody>
{% for row in matrix %}
<tr><th title="{{ row.name }}">{{ row.short }}</th>
{% for cell in row.cells %}
{% if cell.same %}<td class="same"></td>{% else %}
<td{% if cell.percent > 55 %} class="hot"{% endif %} style="--share: {{ cell.percent / 100 }}" title="{{ cell.count }}">
{%- if matrix|length <= 24 and cell.percent %}{{ cell.percent }}{% endif %}</td>{% endif %}
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

<section id="bands">
<h2>Bands</h2>
<p class="soft">Pixels of the training split, in stored units.
{% if published %}The published values are those of the whole archive; the difference is ours from them.
{% if manifest.archive == "bigearthnet_v2" %}They were measured on bands resampled to 120 &times; 120 pixels, which
changes deviations a little.{% endif %}{% endif %}</p>
<div class="wide"><table>
<thead><tr><th>Group</th><th>Band</th><th class="n">Mean</th>
{% if published %}<th class="n">Published</th><th class="n">Difference</th>{% endif %}
<th class="n">Deviation</th>
{% if published %}<th class="n">Published</th><th class="n">Difference</th>{% endif %}</tr></thead>
{% macro measured(ours, theirs) -%}
<td class="n">{{ "{:,.2f}".format(ours) }}</td>
{% if theirs %}
<td class="n">{{ "{:,.2f}".format(theirs) }}</td><td class="n">{{ "{:+.1f}".format(100 * (ours / theirs - 1)) }} %</td>
{% elif published %}
<td class="n">&ndash;</td><td class="n">&ndash;</td>
{% endif %}
{%- endmacro %}
<tbody>
{% for band in bands %}
<tr><th>{{ band.group }}</th><td>{{ band.name }}</td>
{{ measured(band.mean, band.published and band.published.mean) }}
{{ measured(band.std, band.published and band.published.std) }}
</tr>
{% endfor %}
</tbody></table></div>
{% if histograms %}
<h3>Histograms</h3>
<p class="soft">Share of pixels by value; the line is the mean. 16-bit axes of a group end where 99.9 % of the pixels of
each of its bands are shown.{% if histograms|length < bands|length %} Bands of floating-point values have no histogram;
of very many bands, only the first are shown.{% endif %}</p>
<div class="plots">
{% for band in histograms %}
<figure><figcaption><b>{{ band.name }}</b> <span class="soft">{{ band.group }}</span></figcaption>
{{ picture(band.plot, "Histogram of " ~ band.name) }}</figure>
{% endfor %}
</div>
{% endif %}
</section>

<section id="samples">
<h2>Training samples</h2>
<p class="soft">{{ samples|length }} samples were drawn at random; a new report shows the same ones.</p>
<div class="sheet">
{% for sample in samples %}
<figure><img src="{{ sample.image }}" alt="Preview of {{ sample.id }}">
<figcaption>{{ sample.labels|join(" · ") }}<code>{{ sample.id }}</code></figcaption></figure>
{% endfor %}
</div>
</section>

<section id="rejected">
<h2>Records left out</h2>
{% if not rejected_total %}
<p class="soft">There are none: every record of the archive is in the dataset.</p>
{% else %}
<p class="soft">{{ number(rejected_total) }} records could not be used; all of them are listed in
<code>_rejected.parquet</code>.</p>
<div class="wide"><table>
<thead><tr><th>Reason</th><th class="n">Records</th></tr></thead>
<tbody>
{% for reason in reasons %}
<tr><th>{{ reason.text }}</th><td class="n">{{ number(reason.count) }}</td></tr>
{% endfor %}
</tbody></table></div>
<h3>{{ "The first " ~ rejected|length ~ " records" if rejected|length < rejected_total else "The records" }}</h3>
<div class="wide"><table class="rejected">
<thead><tr><th>Id</th><th>File</th><th>Reason</th><th>Detail</th></tr></thead>
<tbody>
{% for row in rejected %}
<tr><td>{{ row.id }}</td><td>{{ row.file }}</td><td>{{ row.reason }}</td><td>{{ row.detail }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
</section>
{% endblock %}
"""
