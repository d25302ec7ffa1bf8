"""Callbacks of runs."""

# Callbacks of every run: key -> file and class. Arguments of the class are keys KEY.*.
EVERY_RUN = {
    "speed": "speed:SpeedMonitor",
    "progress": "report:StepProgress",
    "samples": "samples:SampleText",
    "checkpoint": "checkpoint:RunCheckpoint",
    "signals": "signals:StopSignals",
}
