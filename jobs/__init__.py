"""The commands. Importing them finds out whether another folder hides a package of Groundswell with the same name."""

from groundswell import check_packages

check_packages()
