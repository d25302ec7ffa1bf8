"""Callbacks of runs."""

# Callbacks of every run: key -> file and class. Arguments of the class are keys KEY.*.
EVERY_RUN = {
    "replicas": "signals:Replicas",  # first: nothing is written before it agrees
    "speed": "speed:SpeedMonitor",
    "progress": "report:StepProgress",
    "samples": "samples:SampleText",
    "checkpoint": "checkpoint:RunCheckpoint",
    "signals": "signals:StopSignals",
    "watchdog": "signals:Watchdog",
}
