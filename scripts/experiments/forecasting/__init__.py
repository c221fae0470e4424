"""Long-term forecasting: series, windows, forecasters, baselines and what is written about them."""
