"""The steps of trainings that tests run."""


def note_steps(monkeypatch, trainer_class) -> list[tuple[int, int]]:
    """The seed and the number of every step that trainers of a class take from here on."""
    taken: list[tuple[int, int]] = []
    training_step = trainer_class.training_step

    def note(trainer, *args, **kwargs):
        taken.append((trainer.args.seed, trainer.state.global_step))
        return training_step(trainer, *args, **kwargs)

    monkeypatch.setattr(trainer_class, "training_step", note)
    return taken
