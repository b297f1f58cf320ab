# Databricks notebook source
# MAGIC %md
# MAGIC # Score a table
# MAGIC
# MAGIC A logged model predicts the labels of every sample of a dataset, or of a raw archive, whose layout is named
# MAGIC (`bigearthnet_v2`). The predictions are Parquet files, each sample once. A stopped job continues when the
# MAGIC notebook runs again.
# MAGIC
# MAGIC **Runtime**: an ML runtime, dedicated access mode (Spark Connect: tried on Spark's own server). GPUs are not
# MAGIC needed. `train_on_workers` logs the model.

# COMMAND ----------

# MAGIC %pip install --quiet /Volumes/main/default/groundswell/groundswell-0.2.0.dev0-py3-none-linux_x86_64.whl

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("model", "models:/main.default.groundswell@champion", "Model")
dbutils.widgets.text("input", "/Volumes/main/default/groundswell/dataset", "Dataset or raw archive")
dbutils.widgets.text("archive", "", "Layout of a raw archive; empty: a dataset")
dbutils.widgets.text("output", "/Volumes/main/default/groundswell/predictions", "Predictions")

# COMMAND ----------

import groundswell

source, output = dbutils.widgets.get("input"), dbutils.widgets.get("output")
kind = dbutils.widgets.get("archive")
config = groundswell.load(None, archive={"kind": kind, "root": source}) if kind else groundswell.load(None)
scored = groundswell.score(config, dbutils.widgets.get("model"), source, output)
print(f"{scored.predictions} predictions, {scored.rejected} samples rejected")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Look
# MAGIC A row has the sample's id, the probability of each class and the predicted labels. With `archive.id` it also has
# MAGIC the key column of its table: `table.join(predictions, "patch")`.

# COMMAND ----------

predictions = spark.read.option("pathGlobFilter", "*-part-*.parquet").parquet(output)
display(predictions.limit(20))

# COMMAND ----------

from pyspark.sql.functions import explode

labels = predictions.select(explode("labels").alias("label")).groupBy("label").count()
display(labels.orderBy("count", ascending=False))
