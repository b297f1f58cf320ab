# Databricks notebook source
# MAGIC %md
# MAGIC # Compare runs
# MAGIC
# MAGIC The trainings of an experiment in one table: recipe, score over seeds, time, bytes. Then their curves, and only
# MAGIC the settings that differ. `train_on_workers` records a training each time it runs.
# MAGIC
# MAGIC **Runtime**: an ML runtime, any access mode. Spark is not used: a single node is enough.

# COMMAND ----------

# MAGIC %pip install --quiet /Volumes/main/default/groundswell/groundswell-0.2.0.dev0-py3-none-linux_x86_64.whl

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("experiment", "train_on_workers", "Experiment: beside this notebook's, or an absolute name")
dbutils.widgets.text("filter", "", "MLflow's filter; empty: all trainings")
dbutils.widgets.text("metric", "", "Metric; empty: top-1, micro F1 or loss")
dbutils.widgets.text("output", "/Volumes/main/default/groundswell/comparison", "Report")

# COMMAND ----------

import groundswell

compared = groundswell.compare(
    dbutils.widgets.get("experiment"),
    filter_text=dbutils.widgets.get("filter"),
    metric=dbutils.widgets.get("metric") or None,
)
compared

# COMMAND ----------

# MAGIC %md
# MAGIC ## The table in full
# MAGIC A row has the trainings that differ in nothing but their seed. Columns named `setting` are those that differ.

# COMMAND ----------

display(compared.table)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Curves

# COMMAND ----------

display(compared.plot())

# COMMAND ----------

# MAGIC %md
# MAGIC ## The report
# MAGIC One page with tables, curves and time to a score; the tables also as CSV.

# COMMAND ----------

compared.write(dbutils.widgets.get("output"))
displayHTML(compared.page)
