"""The commands. Their import checks that no other folder hides a package of Groundswell."""

from groundswell import check_packages

check_packages()
