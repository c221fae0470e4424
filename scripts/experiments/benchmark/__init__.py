"""Time, memory and counted operations of encoders alike in all but their architecture."""
