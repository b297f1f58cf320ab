"""The page of a comparison: one file, no script, nothing fetched."""

TEMPLATE = """\
{% extends "base" %}
{% from "parts" import picture %}
{%- macro both(plots, text) -%}
<figure class="alone"><div class="only-wide">{{ picture(plots.wide, text) }}</div>
<div class="narrow">{{ picture(plots.narrow, text) }}</div></figure>
{%- endmacro -%}
{%- macro key(color) -%}<span class="key" style="--color: {{ color }}"></span>{%- endmacro -%}
{% block title %}Comparison of {{ title }}{% endblock %}
{% block body %}
<header>
<h1>Comparison of {{ title }}</h1>
<div class="soft">{{ runs }} training{{ "s" if runs != 1 }} in {{ groups }} group{{ "s" if groups != 1 }}. Trainings of
one group differ in nothing but the seed.</div>
<dl>
<div><dt>Metric</dt><dd>{{ metric }}{{ ", lower is better" if lower_is_better }}</dd></div>
{% for part in parts %}{% if part.best %}
<div><dt>Best{{ " on " ~ part.name if parts|length > 1 }}</dt><dd>{{ part.best.score }}</dd></div>
<div><dt>Best group</dt><dd>{{ part.best.label }}</dd></div>
{% endif %}{% endfor %}
{% if first_date %}<div><dt>Trained</dt>
<dd>{{ first_date }}{{ " to " ~ last_date if last_date != first_date }}</dd></div>{% endif %}

</dl>
{% if notes %}
<ul class="notes">
{% for note in notes %}<li class="warn">{{ note }}</li>
{% endfor %}
</ul>
{% endif %}
</header>
{% for part in parts %}
{% if parts|length > 1 %}
<section class="dataset"><h2>Dataset {{ part.name }}</h2></section>
{% endif %}

<section class="table">
<h2>Recipes and results</h2>
<p class="soft">{{ metric }} is the best epoch's, mean ± standard deviation over the seeds that ended well. Time is that
of training steps: starting, evaluation and interruptions are left out. Bytes are what one rank gave to the collective.
A dash stands for what is not recorded.
Speed-up is in images per second against the same network on the fewest workers and then the smallest batch; efficiency
is speed-up by how many times as many workers there are.</p>
<div class="wide"><table class="runs">
<thead><tr><th>#</th><th>Group</th><th class="n">{{ metric }}</th><th class="n">Seeds</th><th class="n">Time</th>
<th class="n">Bytes</th><th class="n">Speed-up</th><th class="n">Efficiency</th><th class="n">Batch</th>
<th class="n">Workers</th><th class="n">Peak rate</th><th>Warm-up</th><th>Optimizer</th><th>Codec</th><th>Precision</th>
<th class="n">Epochs</th><th class="n">Steps</th><th class="n">A step</th><th class="n">Images/s</th>
<th class="n">Last epoch</th></tr></thead>
<tbody>
{% for row in part.rows %}
<tr><th>{{ key(part.colors[row.number]) }}{{ row.number }}</th><td class="label">{{ row.label }}
{%- if row.diverged %}<span class="mark">
{{- row.diverged ~ " of " ~ row.trainings ~ " trainings " if row.trainings > 1 }}diverged</span>
{%- elif row.mark %}<span class="mark">{{ row.mark }}</span>{% endif %}</td>
<td class="n{{ ' best' if part.best and row.number == part.best.number }}">{{ row.score }}</td>
<td class="n">{{ row.seeds }}</td><td class="n">{{ row.time }}</td><td class="n">{{ row.bytes }}</td>
<td class="n">{{ row.speedup }}</td><td class="n">{{ row.efficiency }}</td>
<td class="n">{{ row.batch }}</td><td class="n">{{ row.workers }}</td><td class="n">{{ row.rate }}</td>
<td>{{ row.warmup }}</td><td>{{ row.optimizer }}</td><td>{{ row.codec }}</td><td>{{ row.precision }}</td>
<td class="n">{{ row.epochs }}</td><td class="n">{{ row.steps }}</td>
<td class="n">{{ row.per_step }}</td><td class="n">{{ row.rate_of_images }}</td><td class="n">{{ row.last }}</td></tr>
{% endfor %}
</tbody></table></div>
{% if part.troubles %}
<h3>What went wrong</h3>
<ul class="notes">
{% for trouble in part.troubles %}<li>Group {{ trouble.number }}, {{ trouble.label }}: {{ trouble.text }}</li>
{% endfor %}
</ul>
{% endif %}
</section>

<section class="differences">
<h2>What differs</h2>
{% if part.differing["keys"] %}
<p class="soft">Only the settings that are not the same in all groups{{ ", the first " ~ part.differing["keys"]|length
if part.differing.hidden }}. {{ part.common }} further settings are the same.</p>
<div class="wide"><table class="settings">
<thead><tr><th>#</th>{% for setting in part.differing["keys"] %}
<th>{{ setting.word }}<code>{{ setting.name }}</code></th>{% endfor %}</tr></thead>
<tbody>
{% for row in part.differing.rows %}
<tr><th>{{ key(part.colors[row.number]) }}{{ row.number }}</th>
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p class="soft">Nothing: all trainings have the same settings, apart from the seed.</p>
{% endif %}
</section>

{% if part.over_batch %}
<section class="batches">
<h2>{{ metric }} by global batch size</h2>
<p class="soft">The best learning rate at each batch size, with the deviation over seeds. A cross at the bottom is a
batch size at which every training diverged.</p>
<ul class="legend">
{% for variant in part.variants %}<li>{{ key(variant.color) }}{{ variant.label }}</li>
{% endfor %}
</ul>
{{ both(part.over_batch, metric ~ " by global batch size") }}
</section>
{% endif %}

{% if part.curves %}
<section class="learning">
<h2>Learning curves</h2>
<p class="soft">A line per training, by what it has cost. A cross is where a training diverged.
{% if part.grey %}The best {{ part.legend|length }} groups have colours, the others are grey.{% endif %}</p>
<ul class="legend">
{% for group in part.legend %}<li>{{ key(group.color) }}{{ group.number }}: {{ group.label }}</li>
{% endfor %}
</ul>
<div class="curves">
{% for curve in part.curves %}
<figure><figcaption>{{ curve.title }}</figcaption>{{ picture(curve.plot, curve.title) }}</figure>
{% endfor %}
</div>
</section>
{% endif %}

{% if part.targets %}
<section class="target">
<h2>Time to {{ metric }} {{ part.target }}</h2>
<p class="soft">At the end of the first epoch that comes there, as means over the seeds that do.
{% if default_target %}The target is
{{ "5 % above the lowest loss" if lower_is_better else "5 % below the best score" }};
choose another one with --target.{% endif %}</p>
<div class="wide"><table class="targets">
<thead><tr><th>#</th><th>Group</th><th>Time</th><th class="n">Epochs</th><th class="n">Steps</th>
<th class="n">Samples</th><th class="n">Bytes</th><th class="n">Seeds</th></tr></thead>
<tbody>
{% for row in part.targets %}
<tr><th>{{ key(part.colors[row.number]) }}{{ row.number }}</th><td class="list">{{ row.label }}</td>
{% if row.reached %}
<td class="bar" style="--width: {{ "{:.2f}".format(100 * row.width) }}%">{{ row.time }}</td>
<td class="n">{{ row.epochs }}</td><td class="n">{{ row.steps }}</td><td class="n">{{ row.samples }}</td>
<td class="n">{{ row.bytes }}</td><td class="n">{{ row.of }}</td>
{% else %}
<td class="soft" colspan="6">not reached</td>
{% endif %}
</tr>
{% endfor %}
</tbody></table></div>
</section>
{% endif %}

{% if part.over_workers %}
<section class="workers">
<h2>Images per second by workers</h2>
<p class="soft">A point per group; the dashed line is what as many times the workers would give without any loss.</p>
{{ both(part.over_workers, "Images per second by number of workers") }}
</section>
{% endif %}
{% endfor %}
{% endblock %}
"""
