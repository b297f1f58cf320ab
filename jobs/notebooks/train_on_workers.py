# Databricks notebook source
# MAGIC %md
# MAGIC # Train on N workers
# MAGIC
# MAGIC A Spark barrier stage runs one Horovod worker per task. They train one network with a large batch, and MLflow
# MAGIC records the run in this notebook's experiment, where the configuration names no other one.
# MAGIC `prepare_and_look` makes the dataset.
# MAGIC
# MAGIC **Runtime**: an ML runtime, dedicated access mode, a cluster of fixed size (no autoscaling). The init script of
# MAGIC `jobs/databricks` has installed Horovod.

# COMMAND ----------

# MAGIC %pip install --quiet /Volumes/main/default/groundswell/groundswell-0.2.0.dev0-py3-none-linux_x86_64.whl

# COMMAND ----------

dbutils.library.restartPython()

# COMMAND ----------

dbutils.widgets.text("config", "bigearthnet_v2_resnet50", "Configuration")
dbutils.widgets.text("dataset", "/Volumes/main/default/groundswell/dataset", "Dataset")
dbutils.widgets.text("output", "/Volumes/main/default/groundswell/outputs", "Checkpoints and logs")
dbutils.widgets.text("workers", "4", "Workers: one per Spark task")
dbutils.widgets.text("gpus", "1", "GPUs of a worker: 0 or 1")
dbutils.widgets.text("epochs", "10", "Epochs")
dbutils.widgets.text("registered_model", "main.default.groundswell", "Registered model")

# COMMAND ----------

import groundswell

config = groundswell.load(
    dbutils.widgets.get("config"),
    dataset={"path": dbutils.widgets.get("dataset")},
    training={"output": dbutils.widgets.get("output"), "epochs": int(dbutils.widgets.get("epochs"))},
    launch={
        "num_workers": int(dbutils.widgets.get("workers")),
        "gpus_per_worker": int(dbutils.widgets.get("gpus")),
    },
    tracking={"registered_model": dbutils.widgets.get("registered_model") or None},
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Train
# MAGIC Each epoch adds a line. When a worker fails, the cell ends with one error. It names the rank that failed first,
# MAGIC with its traceback.

# COMMAND ----------

trained = groundswell.train(config)
trained

# COMMAND ----------

# MAGIC %md
# MAGIC ## Curves

# COMMAND ----------

display(trained.history)

# COMMAND ----------

display(trained.plot())

# COMMAND ----------

# MAGIC %md
# MAGIC ## Test
# MAGIC The metrics of the test split join the same run.

# COMMAND ----------

evaluation = groundswell.evaluate(config, trained.model_uri)
display(evaluation.table)
