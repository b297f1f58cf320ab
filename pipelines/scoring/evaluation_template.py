"""The page of an evaluation: one file, no script, nothing fetched."""

STYLE = """\
.scores td { min-width: 4.5em; padding-right: 10px; }
.scores .name { width: auto; min-width: 13em; max-width: 20em; }
"""
TEMPLATE = """\
{% extends "base" %}
{% from "parts" import picture, number %}
{%- macro score(value) -%}
{% if value == value %}{{ "{:.4f}".format(value) }}{% else %}&ndash;{% endif %}{%- endmacro -%}
{%- macro sheet(patches) -%}
<div class="sheet">
{% for patch in patches %}
<figure><img src="{{ patch.image }}" alt="Patch {{ patch.id }}">
<figcaption>{{ patch.labels|join(" · ") or "no label" }}
<code>{% for each in patch.predicted %}{{ each.percent }} % {{ each.name }}{{ "" if each.right else " (wrong)" }}
{%- if not loop.last %}, {% endif %}{% endfor %}</code>
<code>{{ patch.id }}, loss {{ "{:.3f}".format(patch.loss) }}</code></figcaption></figure>
{% endfor %}
</div>
{%- endmacro -%}
{% block title %}Evaluation · {{ split }}{% endblock %}
{% block body %}
<header>
<h1>Evaluation on {{ split }}</h1>
<div class="soft">{{ number(samples) }} samples</div>
<dl>
{% for name, value in facts.items() %}
<div><dt>{{ name }}</dt><dd><code>{{ value }}</code></dd></div>
{% endfor %}
</dl>
</header>

<section id="metrics">
<h2>Scores</h2>
<div class="wide"><table>
<thead><tr><th>Score</th><th class="n">Value</th><th>Meaning</th></tr></thead>
<tbody>
{% for row in metrics %}
<tr><th>{{ row.name.replace("_", " ") }}</th><td class="n">{{ score(row.value) }}</td>
<td class="list soft">{{ row.text }}</td></tr>
{% endfor %}
</tbody></table></div>
</section>

<section id="classes">
<h2>Classes</h2>
<p class="soft">The most frequent class first. A class is predicted from a probability of 0.5 on.
{% if tuned %}The last columns have the threshold with the largest F1 on the validation split, and the F1 here with
it.{% endif %}</p>
<div class="wide"><table class="classes scores">
<thead><tr><th>Class</th><th class="n">Samples</th><th class="n">Precision</th><th class="n">Recall</th><th>F1</th>
<th class="n">Average precision</th>
{% if tuned %}<th class="n">Threshold</th><th class="n">F1 with it</th>{% endif %}</tr></thead>
<tbody>
{% for row in classes %}
<tr><th class="name">{{ row.class }}</th><td class="n">{{ number(row.support) }}</td>
<td class="n">{{ score(row.precision) }}</td><td class="n">{{ score(row.recall) }}</td>
<td style="--width: {{ "{:.1f}".format(100 * row.f1) }}%">{{ score(row.f1) }}</td>
<td class="n">{{ score(row.average_precision) }}</td>
{% if tuned %}<td class="n">{{ "{:.3f}".format(row.threshold) }}</td><td class="n">{{ score(row.f1_tuned) }}</td>
{% endif %}</tr>
{% endfor %}
</tbody></table></div>
</section>

<section id="calibration">
<h2>Calibration</h2>
<p class="soft">Decisions by their probability. On the dotted line a probability of 0.8 is right in 80 % of the
cases.</p>
<div class="wide">{{ picture(reliability, "Reliability curve") }}</div>
<div class="wide"><table>
<thead><tr><th>Probability</th><th class="n">Decisions</th><th class="n">Mean probability</th>
<th class="n">Part that is right</th></tr></thead>
<tbody>
{% for row in reliability_rows %}
<tr><th>{{ row.range }}</th><td class="n">{{ number(row.count) }}</td><td class="n">{{ score(row.confidence) }}</td>
<td class="n">{{ score(row.accuracy) }}</td></tr>
{% endfor %}
</tbody></table></div>
</section>

{% if slices %}
<section id="slices">
<h2>Where and when</h2>
<p class="soft">Scores of the samples with each value, as far as the archive says it.</p>
{% for table in slices %}
<div class="wide"><table>
<thead><tr><th>{{ table.title }}</th><th class="n">Samples</th>
{% for name in table.names %}<th class="n">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr><th>{{ row.value }}</th><td class="n">{{ number(row.samples) }}</td>
{% for value in row.scores %}<td class="n">{{ score(value) }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% if table.hidden %}<p class="soft">{{ number(table.hidden) }} values with fewer samples are in the table of
slices.</p>{% endif %}
{% endfor %}
</section>
{% endif %}

<section id="pairs">
<h2>Labels that are confused</h2>
{% if pairs %}
<p class="soft">Samples in which one label was missed and another was predicted that is not there.</p>
<div class="wide"><table>
<thead><tr><th>Missed</th><th>Predicted instead</th><th class="n">Samples</th></tr></thead>
<tbody>
{% for row in pairs %}
<tr><td class="list">{{ row.missed }}</td><td class="list">{{ row.predicted }}</td>
<td class="n">{{ number(row.samples) }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p class="soft">There are none.</p>
{% endif %}
</section>

<section id="best">
<h2>Best patches</h2>
<p class="soft">The lowest cross-entropy. Below the labels: the likeliest classes with their probabilities.</p>
{{ sheet(best) }}
</section>

<section id="worst">
<h2>Worst patches</h2>
<p class="soft">The highest cross-entropy.</p>
{{ sheet(worst) }}
</section>
{% endblock %}
"""
