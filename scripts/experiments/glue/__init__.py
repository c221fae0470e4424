"""The nine tasks of GLUE: readers, metrics, the table and the files of a submission."""
