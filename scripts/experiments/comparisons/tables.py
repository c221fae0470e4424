"""The tables that can be reproduced, by name."""

from experiments.comparisons import book_tables, forecasting_tables, frontier_tables, lra_tables, text_tables


TABLES = (
    text_tables.TABLES | frontier_tables.TABLES | book_tables.TABLES | forecasting_tables.TABLES | lra_tables.TABLES
)
