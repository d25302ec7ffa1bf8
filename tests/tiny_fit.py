"""Options of a `fit` that takes a second: the smallest GPT on the CPU."""

TINY_MODEL = [
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=8",
    "--model.config.block_size=16",
    "--model.config.vocab_size=null",
    "--model.schedule=constant",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=1",
    "--samples.max_new_tokens=0",
]
# in a folder with the fixture `text_file`
TINY_FIT = [*TINY_MODEL, "--data.text_file=text.txt", "--data.tokenizer=char"]
TINY_RUN = [
    *TINY_FIT,
    "--trainer.val_check_interval=4",
    "--trainer.check_val_every_n_epoch=null",
    "--run_name=run",
]
