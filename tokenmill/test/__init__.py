"""Stands in for `sglang.test`, from which notebooks import `doc_patch`; our own tests live elsewhere."""
