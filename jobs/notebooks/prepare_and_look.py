# Databricks notebook source
# MAGIC %md
# MAGIC # Prepare an archive and look at it
# MAGIC
# MAGIC Spark turns a raw archive, such as a BigEarthNet folder, into a dataset: Parquet shards with checksums, which
# MAGIC training reads in a random order. A stopped preparation continues when the notebook runs again.
# MAGIC
# MAGIC **Runtime**: an ML runtime, dedicated access mode (Spark Connect: tried on Spark's own server). The archive and
# MAGIC the dataset are on a volume.

# COMMAND ----------

# MAGIC %pip install --quiet /Volumes/main/default/groundswell/groundswell-0.2.0.dev0-py3-none-linux_x86_64.whl

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("config", "bigearthnet_v2_resnet50", "Configuration")
dbutils.widgets.text("archive", "/Volumes/main/default/bigearthnet/BigEarthNet", "Raw archive")
dbutils.widgets.text("dataset", "/Volumes/main/default/groundswell/dataset", "Dataset")

# COMMAND ----------

import groundswell

path = dbutils.widgets.get("dataset")
config = groundswell.load(
    dbutils.widgets.get("config"), archive={"root": dbutils.widgets.get("archive")}, dataset={"path": path}
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Prepare
# MAGIC A bar shows how far it is. A mistake in the archive is one line, before any task starts.

# COMMAND ----------

manifest = groundswell.prepare(config)
print(", ".join(f"{name} {split.rows} samples" for name, split in manifest.splits.items()))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Look
# MAGIC Labels and metadata are plain columns: Spark reads the dataset as any other table.

# COMMAND ----------

samples = spark.read.parquet(f"{path}/train")
display(samples.groupBy("country", "season").count().orderBy("country", "season"))

# COMMAND ----------

import matplotlib.pyplot as plt
from pyspark.sql.functions import explode

counts = samples.select(explode("label_names").alias("label")).groupBy("label").count().orderBy("count").toPandas()
figure, axes = plt.subplots(figsize=(8, 6))
axes.barh(counts["label"], counts["count"])
axes.set_xlabel("training samples")
figure.tight_layout()
display(figure)
plt.close(figure)  # else some notebooks show it a second time

# COMMAND ----------

# MAGIC %md
# MAGIC ## The report
# MAGIC One page with classes, bands, and samples as pictures.

# COMMAND ----------

from pathlib import Path

displayHTML(Path(path, "report.html").read_text())
