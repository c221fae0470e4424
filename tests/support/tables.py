"""What a table and its runs have left."""

from support.glue_rows import read_metrics


def read_run(folder, name, case="."):
    """What the one run has left whose name begins like this."""
    (found,) = folder.glob(f"{name}*/")
    return read_metrics(found / case)


def cells(text, name):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]
