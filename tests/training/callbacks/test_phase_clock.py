from gpt_lightning.training.callbacks.speed import PhaseClock


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_belongs_to_one_phase():
    time = FakeTime()
    clock = PhaseClock("start-up", now=time)
    time.now += 1
    clock.switch("train")
    time.now += 2
    with clock.phase("checkpoint"):
        time.now += 4
        with clock.phase("samples"):
            time.now += 8
    time.now += 16
    assert clock.seconds() == {"start-up": 1, "train": 18, "checkpoint": 4, "samples": 8}
    assert sum(clock.seconds().values()) == time.now - 100
