"""The tables that can be reproduced, by name."""

from experiments.comparisons import forecasting_tables, frontier_tables, lra_tables, text_tables


TABLES = text_tables.TABLES | frontier_tables.TABLES | forecasting_tables.TABLES | lra_tables.TABLES
