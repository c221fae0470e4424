"""Long Range Arena: data that is read or made, the models, and each task as a job of fine-tuning."""
