"""Wrong inputs: command lines, and words of the one line with which each must end.

The commands run in the folder of wrong_folder.py. CKPT is the path of a whole checkpoint. Variables
before a command are its environment.

FOUND has the 265 inputs of the report, but for nine that are valid today (-V, --config quickstart,
overfit_batches 1, log_every_n_steps 0, a warm-up above max_steps, ...), finetune_shakespeare without
a network (tests/model/test_huggingface.py), and `doctor` on a wrong file, which starts a process.
"""
# ruff: noqa: E501 - a row is a command and its message

# typed by three strangers, in the order of their report
FOUND = [
    ("fit", "data.text_file, or give a configuration: --config quickstart"),
    ("fit quickstart", "unknown argument 'quickstart': did you mean '--config quickstart'?"),
    ("fit tiny.yaml", "unknown argument 'tiny.yaml': did you mean '--config tiny.yaml'?"),
    (
        "fit --config quickstrat.yaml",
        "--config quickstrat.yaml: no such file or configuration: did you mean",
    ),
    (
        "fit --config configs/quickstrat.yaml",
        "--config configs/quickstrat.yaml: no such file or configuration;",
    ),
    (
        "fit --config configs",
        "--config configs: no such file or configuration; gpt-lightning configs",
    ),
    ("fit --config", "-c/--config needs a value: --config VALUE"),
    (
        "fit --config tiny.yaml --model.learing_rate 1e-3",
        "unknown key 'model.learing_rate': did you mean 'model.learning_rate'?",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate fast",
        "model.learning_rate is 'fast'; expected float",
    ),
    (
        "fit --config tiny.yaml --model.optimizer sgd",
        "model.optimizer is 'sgd'; expected adamw, muon",
    ),
    (
        "fit --config tiny.yaml --trainer.precision fp16",
        "trainer.precision is 'fp16'; expected auto, 32-true, bf16-mixed, 16-mixed,",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator cuda",
        "--trainer.accelerator cuda: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator gpu",
        "--trainer.accelerator gpu: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator mps",
        "--trainer.accelerator mps: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator tpu",
        "--trainer.accelerator tpu: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator rocm",
        "--trainer.accelerator rocm: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --devices 5",
        "unknown key 'devices': did you mean 'trainer.devices'?",
    ),
    (
        "fit --config tiny.yaml --accelerator cpu",
        "unknown key 'accelerator': did you mean 'trainer.accelerator'?",
    ),
    ("fit --config tiny.yaml --lr 1e-3", "unknown key 'lr': did you mean 'model.learning_rate'?"),
    (
        "fit --config tiny.yaml --max_steps 5",
        "unknown key 'max_steps': did you mean 'trainer.max_steps'?",
    ),
    (
        "fit --config tiny.yaml --batch_size 4",
        "unknown key 'batch_size': did you mean 'data.batch_size'?",
    ),
    ("fit --config tiny.yaml --compile", "unknown key 'compile': did you mean 'model.compile'?"),
    (
        "fit --config tiny.yaml --trainer.devices 0",
        "trainer.devices is '0'; expected auto, a number of devices, -1 for all",
    ),
    (
        "fit --config tiny.yaml --trainer.devices two",
        "trainer.devices is 'two'; expected auto, a number of devices, -1 for all",
    ),
    (
        "fit --config tiny.yaml --trainer.devices -3",
        "trainer.devices is '-3'; expected auto, a number of devices, -1 for all",
    ),
    ("fit --config tiny.yaml --data.batch_size 0", "data.batch_size is 0; it must be at least 1"),
    ("fit --config tiny.yaml --data.batch_size -4", "data.batch_size is -4; it must be at least 1"),
    (
        "fit --config tiny.yaml --data.batch_size 1000000000000",
        "a step takes 1000000000000 x 1 x 1 windows (data.batch_size x accumulation",
    ),
    ("fit --config tiny.yaml --data.batch_size 4.5", "data.batch_size is '4.5'; expected int"),
    ("fit --config tiny.yaml --trainer.max_steps abc", "trainer.max_steps is 'abc'; expected int"),
    (
        "fit --config tiny.yaml --trainer.max_steps -5",
        "trainer.max_steps is -5; it must be at least -1",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps 0",
        "trainer.max_steps is 0, so there is nothing to train: raise it",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer 0",
        "model.config.n_layer is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer -1",
        "model.config.n_layer is -1; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.n_embd 33",
        "model.config.n_embd 33 is not divisible by n_head 2: set",
    ),
    (
        "fit --config tiny.yaml --model.config.n_head 0",
        "model.config.n_head is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.block_size 100000000",
        "the train split of data/text-char has 14,060 tokens, fewer than a window of",
    ),
    (
        "fit --config tiny.yaml --model.config.dropout 1.5",
        "model.config.dropout is 1.5; it must be at least 0 and below 1",
    ),
    (
        "fit --config tiny.yaml --model.config.vocab_size 10",
        "model.config.vocab_size is 10, but data/text-char has 15 tokens: set it to",
    ),
    (
        "fit --config tiny.yaml --model.config.attention flsh",
        "model.config.attention is 'flsh'; expected auto, sdpa, flash, cudnn, efficient, naive, chu",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file missing.txt",
        "missing.txt: no such file, and no corpus of that name; give a text file's",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file ''",
        "no data given: set exactly one of data.dataset, data.mixture, data.corpus,",
    ),
    (
        "fit --config corpus.yaml --data.text_file bad/latin1.txt",
        "data.corpus and data.text_file given: set exactly one of data.dataset,",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file bad/latin1.txt",
        "bad/latin1.txt is not UTF-8: byte 0xe9 at offset 3; convert it, for example",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file bad",
        "tokenizer char takes its vocabulary from one text, and documents are",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file bad/short.txt",
        "bad/short.txt: the train split has 1 characters, 1 tokens, and needs 2:",
    ),
    (
        "fit --config bad/tabs.yaml",
        "--config bad/tabs.yaml, line 2, column 1: not YAML (found character '\\t'",
    ),
    (
        "fit --config bad/dup.yaml",
        "--config bad/dup.yaml, line 3: 'trainer.max_steps' is set twice; remove one",
    ),
    (
        "fit --config bad/syntax.yaml",
        "--config bad/syntax.yaml, line 2, column 6: not YAML (expected ',' or '}',",
    ),
    (
        "fit --config bad/empty.yaml",
        "--config bad/empty.yaml holds no keys: expected YAML such as `trainer:",
    ),
    (
        "fit --config bad/list.yaml",
        "--config bad/list.yaml holds no keys: expected YAML such as `trainer:",
    ),
    (
        "fit --config bad/litgpt.yaml",
        "unknown key 'train.max_tokens': did you mean 'trainer.max_time'?",
    ),
    (
        "fit --config bad/classpath.yaml",
        "unknown key 'model.init_args.lr': did you mean 'model.learning_rate'?",
    ),
    (
        "fit --config bad/nano.py",
        "--config bad/nano.py holds no keys: expected YAML such as `trainer:",
    ),
    (
        "fit --config bad/utf16.yaml",
        "--config bad/utf16.yaml is not YAML in UTF-8: byte 0xff at offset 0; save",
    ),
    ("fit --config bad/nested.yaml", "trainer.max_steps is \"{'value': 3}\"; expected int"),
    (
        "fit --config bad/random.pt",
        "--config bad/random.pt is not YAML in UTF-8: byte 0x80 at offset 64; save",
    ),
    (
        "fit --config bad/none_section.yaml",
        "--config bad/none_section.yaml, line 1: trainer is empty; expected keys",
    ),
    (
        "fit --config=tiny.yaml --config=missing.yaml",
        "--config missing.yaml: no such file or configuration: did you mean",
    ),
    (
        "fit --config tiny.yaml --data.order zigzag",
        "data.order is 'zigzag'; expected sequential, random, shuffled, repeat,",
    ),
    (
        "fit --config tiny.yaml --data.tokenizer gpt5",
        "no tokenizer is called 'gpt5': choose one of gpt2, p50k_base, p50k_edit,",
    ),
    (
        "fit --config corpus.yaml --data.corpus openwebtext",
        "openwebtext: no such file, and no corpus of that name; give a text file's",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset nowhere",
        "data/nowhere is not a prepared dataset, it has no manifest.json and no",
    ),
    (
        "fit --config tiny.yaml --data.dataset nowhere",
        "data.dataset and data.text_file given: set exactly one of data.dataset,",
    ),
    (
        "fit --config tiny.yaml --data.text_file null",
        "no data given: set exactly one of data.dataset, data.mixture, data.corpus,",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture '{\"a\": 1'",
        "data.mixture is '{\"a\": 1'; expected datasets with weights above 0, such as",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture '{\"a\": -1}'",
        "data/a is not a prepared dataset, it has no manifest.json and no shards of",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset s3://nobucket/x",
        "s3://nobucket/x/manifest.json: Install s3fs to access S3: pip install s3fs",
    ),
    (
        "fit --config tiny.yaml --resume lightning_logs/tiny/version_0 --model.config.n_layer 2 --trainer.max_steps 30",
        "cannot resume from the checkpoint: model.config.n_layer is 2, the",
    ),
    (
        "fit --config tiny.yaml --resume nowhere",
        "--resume nowhere: no whole checkpoint there; give a checkpoint, a run",
    ),
    (
        "fit --config tiny.yaml --resume maybe",
        "--resume maybe: no whole checkpoint there; give a checkpoint, a run folder,",
    ),
    ("fit --config tiny.yaml --resume", "--resume needs a value: --resume VALUE"),
    (
        "fit --config tiny.yaml --run_name ../x",
        "--run_name '../x': give a folder's name, without /, ..,",
    ),
    (
        "fit --config tiny.yaml --ckpt_path bad/random.pt",
        "bad/random.pt is not a checkpoint of gpt-lightning fit: it holds weights",
    ),
    (
        "fit --config tiny.yaml --ckpt_path bad/pytorch_model.bin",
        "bad/pytorch_model.bin is not a checkpoint of gpt-lightning fit: it holds",
    ),
    (
        "fit --config tiny.yaml --ckpt_path bad/other.ckpt",
        "bad/other.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "fit --config tiny.yaml --ckpt_path bad/text.ckpt",
        "bad/text.ckpt is not a checkpoint of gpt-lightning fit: it is a text file;",
    ),
    (
        "fit --config tiny.yaml --ckpt_path last",
        "last does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "fit --config tiny.yaml --ckpt_path best",
        "best does not exist: give a checkpoint or a run folder, such as",
    ),
    ("fit --config tiny.yaml --ckpt_path ''", "ckpt_path is empty; give a value, or leave it out"),
    (
        "fit --config tiny.yaml --model.init_from bad/random.pt",
        "bad/random.pt is not a checkpoint of gpt-lightning fit: it holds weights alone",
    ),
    (
        "fit --config tiny.yaml --model.init_from bad/hf",
        "bad/hf has no checkpoints/*.ckpt: give a checkpoint, or train one with",
    ),
    (
        "fit --config tiny.yaml --model.init_from gpt2",
        "model.config does not fit gpt2: n_layer is 1, there 12, n_head is 2, there",
    ),
    (
        "fit --config tiny.yaml --model.init_from gpt3",
        "gpt3 does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "fit --config tiny.yaml --precision fp8",
        "unknown key 'precision': write trainer.precision: auto (or",
    ),
    (
        "fit --config tiny.yaml --precision bf16-mixed",
        "unknown key 'precision': write trainer.precision: auto (or",
    ),
    (
        "fit --config tiny.yaml --speed.peak_flops lots",
        "peak_flops is 'lots'; use auto, measure, a100 or a positive number of",
    ),
    (
        "fit --config tiny.yaml --speed.peak_flops -1",
        "peak_flops is '-1'; use auto, measure, a100 or a positive number of FLOP/s",
    ),
    (
        "fit --config tiny.yaml --trainer.gradient_clip_val -1",
        "trainer.gradient_clip_val is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --trainer.max_time '1 hour'",
        "trainer.max_time is '1 hour'; expected a time above zero as DD:HH:MM:SS,",
    ),
    (
        "fit --config tiny.yaml --trainer.strategy fsdp",
        "trainer.strategy fsdp is not supported: expected auto, single_device,",
    ),
    (
        "fit --config tiny.yaml --trainer.strategy zzz",
        "trainer.strategy zzz is not supported: expected auto, single_device,",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks nonsense",
        "trainer.callbacks is 'nonsense'; expected a class of callbacks, such as",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks EarlyStopping",
        "trainer.callbacks: EarlyStopping needs monitor: --trainer.callbacks.monitor",
    ),
    (
        "fit --config tiny.yaml --trainer.logger wandb",
        "trainer.logger is 'wandb'; expected false, or a class such as CSVLogger,",
    ),
    (
        "fit --config tiny.yaml --trainer.logger WandbLogger",
        "trainer: wandb is not installed: pip install 'wandb>=0.12.10'",
    ),
    (
        "fit --config tiny.yaml --seed_everything -1",
        "seed_everything is -1; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --seed_everything abc",
        "seed_everything is 'abc'; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --seed_everything 99999999999999999999",
        "seed_everything is 99999999999999999999; expected an integer from 0 to",
    ),
    (
        "fit --config tiny.yaml --model.betas 0.9",
        "model.betas is '0.9'; expected two numbers from 0 to below 1, such as [0.9,",
    ),
    (
        "fit --config tiny.yaml --model.betas '[0.9]'",
        "model.betas is '[0.9]'; expected two numbers from 0 to below 1, such as",
    ),
    (
        "fit --config tiny.yaml --model.betas '[0.9, 1.5]'",
        "model.betas is 1.5; it must be at least 0 and below 1",
    ),
    (
        "fit --config tiny.yaml --trainer.val_check_interval 0",
        "trainer.val_check_interval is 0; set the micro-batches between validations,",
    ),
    (
        "fit --config tiny.yaml --trainer.limit_val_batches 2.5",
        "trainer.limit_val_batches is 2.5; expected a fraction from 0 to 1 or a",
    ),
    (
        "fit --config tiny.yaml --trainer.profiler foo",
        "trainer.profiler is 'foo'; expected simple, advanced, pytorch",
    ),
    (
        "fit --config tiny.yaml --model.compile maybe",
        "model.compile is 'maybe'; expected bool, auto",
    ),
    (
        "fit --config tiny.yaml --trainer.default_root_dir /proc/x",
        "cannot write to /proc/x/lightning_logs/tiny: No such file or directory;",
    ),
    (
        "fit --config tiny.yaml --trainer.default_root_dir /dev/null",
        "cannot write to /dev/null/lightning_logs/tiny: Not a directory; check the",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate nan",
        "model.learning_rate is nan; it must be above 0",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate inf",
        "model.learning_rate is inf; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate 1e400",
        "model.learning_rate is inf; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate",
        "--model.learning_rate needs a value: --model.learning_rate VALUE",
    ),
    (
        "fit --config tiny.yaml --data.val_fraction 1.0",
        "val_fraction 1.0 and test_fraction 0.0 leave nothing to train on: their sum",
    ),
    (
        "fit --config tiny.yaml --data.val_fraction 2",
        "data.val_fraction is 2; it must be at least 0 and at most 1",
    ),
    (
        "fit --config tiny.yaml --trainer.max_epochs 0",
        "trainer.max_epochs is 0, so there is nothing to train: raise it",
    ),
    (
        "fit --config tiny.yaml --trainer.accumulate_grad_batches 0",
        "trainer.accumulate_grad_batches is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --trainer.accumulate_grad_batches 3",
        "trainer.val_check_interval 20 counts micro-batches and is not a multiple of",
    ),
    (
        "fit --config tiny.yaml --data.tokens_per_step 1000",
        "data.tokens_per_step 1000 is not a multiple of the 128 tokens of a",
    ),
    (
        "fit --config tiny.yaml --data.num_workers -1",
        "data.num_workers is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --trainer.log_every_n_steps -1",
        "trainer.log_every_n_steps is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --samples.temperature -1",
        "samples.temperature is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --checkpoint.keep_last 0",
        "checkpoint.keep_last is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --trainer.num_nodes 0",
        "trainer.num_nodes is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --trainer.plugins foo",
        "trainer.plugins is 'foo'; expected null, list",
    ),
    (
        "fit --config tiny.yaml --trainer.deterministic maybe",
        "trainer.deterministic is 'maybe'; expected null, bool, warn",
    ),
    (
        "fit --config tiny.yaml --trainer.precision 16-true --trainer.max_steps 2 --samples.max_new_tokens 0",
        "--trainer.precision 16-true on cpu: float16 training needs a GPU; use",
    ),
    (
        "fit --config tiny.yaml --trainer.barebones true",
        "trainer.barebones would train without loggers, checkpoints and callbacks:",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer=3 --model.config '{\"n_layer\": oops'",
        "model.config is '{\"n_layer\": oops'; expected keys, such as",
    ),
    (
        "validate",
        "validate has no model: give a run, `validate lightning_logs/NAME`, or --ckpt_path",
    ),
    (
        "validate --config tiny.yaml",
        "validate has no model: give a run, `validate lightning_logs/NAME`, or --ckpt_path",
    ),
    (
        "validate --config tiny.yaml --ckpt_path missing.ckpt",
        "missing.ckpt does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "validate --config tiny.yaml --ckpt_path configs",
        "configs does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "validate --config tiny.yaml --data.tokenizer byte --ckpt_path lightning_logs/tiny/version_0",
        "the checkpoint was trained on other tokens than those of data/text-byte",
    ),
    (
        "validate --config tiny.yaml --ckpt_path bad/pytorch_model.bin",
        "bad/pytorch_model.bin is not a checkpoint of gpt-lightning fit: it holds",
    ),
    (
        "test --config tiny.yaml --ckpt_path lightning_logs/tiny/version_0",
        "data/text-char has no test split, only train, val: make a dataset with one,",
    ),
    (
        "predict --config tiny.yaml",
        "predict has no model: give a run, `predict lightning_logs/NAME`, or --ckpt_path",
    ),
    (
        "predict --config tiny.yaml --ckpt_path bad/other.ckpt",
        "bad/other.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    ("prepare", "missing source; `gpt-lightning prepare --help` lists the options"),
    (
        "prepare missing.txt",
        "missing.txt: no such file, and no corpus of that name; give a text file's",
    ),
    ("prepare bad/empty.txt", "bad/empty.txt is empty: give it some text"),
    (
        "prepare bad/random.pt",
        "bad/random.pt is no text, it begins as zip: unpack it",
    ),
    (
        "prepare bad/empty --out o1",
        "bad/empty holds no documents: expected files that end in .jsonl, .jsonl.gz,",
    ),
    (
        "prepare bad/latin1.txt --out o2",
        "bad/latin1.txt is not UTF-8: byte 0xe9 at offset 3; convert it, for example",
    ),
    (
        "prepare tinyshakespear",
        "tinyshakespear: no such file, and no corpus of that name; give a text",
    ),
    ("prepare tinyshakespeare --tokenizer nope", "could not fetch tinyshakespeare:"),
    (
        "prepare tinyshakespeare --tokenizer char --val_fraction 2",
        "val_fraction is 2; it must be at least 0 and at most 1",
    ),
    (
        "prepare tinyshakespeare --tokenizer char --out tiny.yaml",
        "could not fetch tinyshakespeare:",
    ),
    (
        "prepare tinyshakespeare --tokenizer char --shard_tokens 0 --out o3",
        "shard_tokens is 0; it must be at least 1",
    ),
    (
        "prepare tinyshakespeare --tokenizer char --workers 0 --out o4",
        "workers is 0; it must be at least 1",
    ),
    ("prepare tinyshakespeare --format bin", "format is 'bin'; expected npy, nanogpt, llmc"),
    ("prepare hf:foo", "hf:foo: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"),
    (
        "prepare http://127.0.0.1:9/x.txt",
        "cannot read http://127.0.0.1:9/x.txt: Cannot connect to host 127.0.0.1:9",
    ),
    (
        "prepare tinyshakespeare --tokenizr char",
        "unknown key 'tokenizr': did you mean 'tokenizer'?",
    ),
    (
        "prepare tinyshakespeare tinyshakespeare",
        "tinyshakespeare: is prepared alone; several sources are files, folders, globs,",
    ),
    ("prepare '*.nothing' --out o5", "*.nothing: no file matches; check the pattern, and quote it"),
    ("verify", "missing folder; `gpt-lightning verify --help` lists the options"),
    (
        "verify missing",
        "missing is not a prepared dataset, it has no manifest.json and no shards of",
    ),
    ("verify tiny.yaml", "tiny.yaml is a file; give the folder of a dataset"),
    (
        "verify configs",
        "configs is not a prepared dataset, it has no manifest.json and no shards of",
    ),
    ("data inspct", "action is 'inspct'; expected inspect"),
    ("data inspect", "missing folder; `gpt-lightning data --help` lists the options"),
    (
        "data inspect missing",
        "missing is not a prepared dataset, it has no manifest.json and no shards of",
    ),
    (
        "data inspect data/text-char --offset 99999999999",
        "--offset is 99,999,999,999, and the train split of data/text-char has",
    ),
    (
        "data inspect data/text-char --offset -1",
        "--offset is -1, and the train split of data/text-char has 14,060 tokens:",
    ),
    (
        "data inspect data/text-char --split foo",
        "--split is 'foo', and data/text-char has train, val: choose one",
    ),
    ("data inspect data/text-char --length abc", "length is 'abc'; expected int"),
    ("sample", "missing path; `gpt-lightning sample --help` lists the options"),
    ("sample missing", "missing does not exist: give a checkpoint or a run folder, such as"),
    (
        "sample lightning_logs/tiny/version_0 --prompt FILE:nope",
        "--prompt: cannot read nope: [Errno 2] No such file or directory: 'nope'",
    ),
    (
        "sample lightning_logs/tiny/version_0 --prompt 日本",
        "character '日' at position 0 is not among the 15 characters of the",
    ),
    (
        "sample lightning_logs/tiny/version_0 --max_new_tokens -1",
        "max_new_tokens is -1; it must be at least 1",
    ),
    (
        "sample lightning_logs/tiny/version_0 --temperature -1",
        "temperature is -1; it must be at least 0",
    ),
    (
        "sample lightning_logs/tiny/version_0 --temperature hot",
        "temperature is 'hot'; expected float",
    ),
    ("sample lightning_logs/tiny/version_0 --top_k 0", "top_k is 0; it must be at least 1"),
    (
        "sample lightning_logs/tiny/version_0 --device cuda",
        "--device cuda: this machine has no such device (it has: cpu); use --device",
    ),
    (
        "sample lightning_logs/tiny/version_0 --dtype fp16",
        "dtype is 'fp16'; expected auto, fp32, bf16",
    ),
    (
        "sample bad/random.pt",
        "bad/random.pt is not a checkpoint of gpt-lightning fit: it holds weights",
    ),
    (
        "sample bad/pytorch_model.bin",
        "bad/pytorch_model.bin is not a GPT-2 ('transformer.wpe.weight' is missing)",
    ),
    (
        "sample bad/other.ckpt",
        "bad/other.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "sample tiny.yaml",
        "tiny.yaml is not a checkpoint of gpt-lightning fit: it is a text file; give",
    ),
    ("sample configs", "configs does not exist: give a checkpoint or a run folder, such as"),
    (
        "sample lightning_logs/tiny/version_0 --num_samples 0",
        "num_samples is 0; it must be at least 1",
    ),
    ("sample ''", "path is empty; give a value, or leave it out"),
    (
        "sample lightning_logs/tiny/version_0 --length 5",
        "unknown key 'length': did you mean 'max_new_tokens'?",
    ),
    ("sample lightning_logs/tiny/version_0 --prompt", "--prompt needs a value: --prompt VALUE"),
    ("reproduce", "reproduce needs a table: give one of lecture-ladder, precision-ladder,"),
    ("reproduce foo", "no published table 'foo'; there are lecture-ladder, precision-ladder,"),
    (
        "reproduce lecture-ladder --rungs nope",
        "lecture-ladder has no rung 'nope'; it has overfit-one-batch,",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --steps -1",
        "--steps is -1, which leaves lecture-ladder no loss to compare: raise --steps",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --accelerator gpu",
        "--accelerator gpu: this machine has no such device (it has: cpu); use",
    ),
    ("reproduce shakespeare-char-smal", "no published table 'shakespeare-char-smal': did you mean"),
    (
        "reproduce lecture-ladder --rungs gpt2-init --model.nope 3",
        "unknown key 'model.nope': did you mean 'model.compile'?",
    ),
    ("reproduce --lst", "unknown key 'lst': did you mean 'list'?"),
    ("bench foo", "no bench 'foo'; gpt-lightning bench --help lists them"),
    (
        "bench sizes --sizes huge",
        "--sizes is 'huge': 'huge' is none of small, medium, large, xl, 2.7B",
    ),
    (
        "bench sizes --device cuda",
        "--device cuda: this machine has no such device (it has: cpu); use --device",
    ),
    ("bench compare a b", "a: No such file or directory; give a folder of `bench`, which holds"),
    ("bench ladder --rungs x", "--rungs is 'x': 'x' is none of fp32, tf32, bf16, compile, flash,"),
    ("bench gpu", "bench gpu: no NVIDIA GPU on this machine; use bench sizes and bench peers,"),
    ("bench matmul --dtypes int4", "--dtypes is 'int4': 'int4' is none of fp32, tf32, bf16, fp16"),
    ("bench sizes --steps -1", "steps is -1; it must be at least 1"),
    (
        "bench attention --foo",
        "unknown key 'foo'; `gpt-lightning bench attention --help` lists the options",
    ),
    ("bench fit-batch", "give bench fit-batch --config FILE: the configuration to fit"),
    (
        "bench fit-batch --config missing.yaml",
        "--config missing.yaml: no such file or configuration: did you mean",
    ),
    ("checkpoint", "missing action, path; `gpt-lightning checkpoint --help` lists the options"),
    ("checkpoint foo", "action is 'foo'; expected inspect, verify"),
    (
        "checkpoint inspect missing",
        "missing: no checkpoint there; give one, or a run folder with checkpoints/",
    ),
    (
        "checkpoint verify bad/random.pt",
        "bad/random.pt has no digest in random.pt.sha256, so it cannot be checked:",
    ),
    (
        "checkpoint inspect bad/random.pt",
        "bad/random.pt is not a checkpoint of gpt-lightning fit: it holds weights",
    ),
    (
        "checkpoint inspect bad/other.ckpt",
        "bad/other.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "checkpoint inspect bad/pytorch_model.bin",
        "bad/pytorch_model.bin is not a checkpoint of gpt-lightning fit: it holds",
    ),
    (
        "checkpoint inspect configs",
        "configs: no checkpoint there; give one, or a run folder with checkpoints/",
    ),
    (
        "checkpoint inspect bad/empty.ckpt",
        "bad/empty.ckpt is not a checkpoint of gpt-lightning fit: it is empty, so",
    ),
    ("checkpoint verify", "missing path; `gpt-lightning checkpoint --help` lists the options"),
    ("doctor --resume", "give doctor --resume --config quickstart (or your configuration), doctor"),
    (
        "doctor --config tiny.yaml",
        "give doctor --resume --config quickstart (or your configuration), doctor",
    ),
    (
        "doctor --json --resume --config tiny.yaml",
        "give doctor --resume --config quickstart (or your",
    ),
    (
        "doctor --resume --config missing.yaml",
        "--config missing.yaml: no such file or configuration: did you mean",
    ),
    (
        "doctor --resume --config tiny.yaml --steps 1",
        "--steps is 1 and --kills 3; they must be at least 4 and 1",
    ),
    ("doctor --resum", "unknown key 'resum': did you mean 'resume'?"),
    ("completion", "missing shell; `gpt-lightning completion --help` lists the options"),
    ("completion powershell", "shell is 'powershell'; expected bash, zsh, fish"),
    ("train", "no command 'train': did you mean 'fit'?; gpt-lightning --help lists them"),
    ("--foo", "no command '--foo': the command comes first; gpt-lightning --help lists them"),
    ("Fit", "no command 'Fit': did you mean 'fit'?; gpt-lightning --help lists them"),
    ("''", "no command ''; gpt-lightning --help lists them"),
    ("fit --hlep", "unknown key 'hlep': did you mean 'help'?"),
    ("fit --version", "unknown key 'version': `gpt-lightning --version` prints it"),
    (
        "fit --config tiny.yaml --model.min_learning_rate 1.0",
        "model.min_learning_rate 1.0 is above model.learning_rate 0.01: lower it, or",
    ),
    (
        "fit --config tiny.yaml --trainer.gradient_clip_algorithm value --trainer.gradient_clip_val -1",
        "trainer.gradient_clip_val is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --trainer.gradient_clip_val nan",
        "trainer.gradient_clip_val is 'nan'; expected null, int, float",
    ),
    (
        "fit --config tiny.yaml --trainer.limit_val_batches -1",
        "trainer.limit_val_batches is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --trainer.max_epochs 1 --trainer.max_steps -1",
        "the cosine decay has no end: set trainer.max_steps or model.decay_steps, or",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks+ ThroughputMonitor",
        "trainer.callbacks: ThroughputMonitor needs batch_size_fn:",
    ),
    (
        "fit --config tiny.yaml --trainer.gradient_clip_algorithm foo --trainer.gradient_clip_val 1",
        "trainer.gradient_clip_algorithm is 'foo'; expected norm, value",
    ),
    (
        "fit --config configs/gpt2_124m.yaml",
        "--config configs/gpt2_124m.yaml: no such file or configuration: did you",
    ),
    (
        "fit --config configs/gpt2_124m.yaml --config configs/model/gpt2-xl.yaml --data.tokens_per_step 524288",
        "--config configs/gpt2_124m.yaml: no such file or configuration: did you",
    ),
    (
        "fit --config tiny.yaml --trainer.val_check_interval 0.5",
        "trainer.val_check_interval 0.5 is a fraction of an epoch, and",
    ),
    (
        "fit --config tiny.yaml --trainer.accumulate_grad_batches 2 --data.tokens_per_step 512",
        "trainer.accumulate_grad_batches is 2, but data.tokens_per_step 512 means 4",
    ),
    (
        "fit --config tiny.yaml --samples.max_new_tokens -3",
        "samples.max_new_tokens is -3; it must be at least 0",
    ),
    ("fit --config tiny.yaml --samples.top_k 0", "samples.top_k is 0; it must be at least 1"),
    (
        "fit --config tiny.yaml --progress.plain_every_n_steps 0",
        "progress.plain_every_n_steps is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --speed.warmup_steps -1",
        "speed.warmup_steps is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --data.shuffle_windows 0",
        "data.shuffle_windows is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --data.data_dir /proc",
        "cannot write /proc/text-char: No such file or directory; check the disk's",
    ),
    (
        "fit --config tiny.yaml --data.mixture '{\"data/text-char\": 0}' --data.text_file null",
        "data.mixture.data/text-char is 0.0; a weight must be above 0",
    ),
    (
        "fit --config tiny.yaml --data.mixture '{\"data/text-char\": -1}' --data.text_file null",
        "data.mixture.data/text-char is -1.0; a weight must be above 0",
    ),
    (
        'fit --config tiny.yaml --data.mixture \'{"data/text-char": "much"}\' --data.text_file null',
        "data.mixture is \"{'data/text-char': 'much'}\"; expected datasets with",
    ),
]

# of the same kinds: other keys, values, files and commands
MORE = [
    ("verify bad/not_json", "bad/not_json/manifest.json: not valid JSON (Expecting property name"),
    (
        "verify bad/flipped_shard",
        "bad/flipped_shard: 1 fault in 2 shards: train-00000.npy: expected only",
    ),
    (
        "verify bad/short_shard",
        "bad/short_shard: 1 fault in 2 shards: train-00000.npy: expected 14,060",
    ),
    (
        "verify bad/missing_shard",
        "bad/missing_shard: 1 fault in 2 shards: train-00000.npy: expected 14,060",
    ),
    ("verify bad/nano", "bad/nano: expected tokens of uint16 in the format nanogpt, found in"),
    ("verify ''", "folder is empty; give a value, or leave it out"),
    (
        "verify data/text-char extra",
        "unknown argument 'extra': remove it, or quote the value that it is a part of",
    ),
    (
        "verify --folder data/text-char",
        "unknown key 'folder': give the value alone, without --folder",
    ),
    (
        "data inspect bad/no_tokenizer",
        "bad/no_tokenizer/manifest.json: tokenizer is missing, expected dict; make",
    ),
    (
        "data inspect bad/text_vocabulary",
        "bad/text_vocabulary/manifest.json: vocab_size is 'many', expected int; make",
    ),
    ("data inspect data/text-char --length -5", "length is -5; it must be at least 0"),
    (
        "data inspect data/text-char --out /proc/x.png",
        "--out: these documents have no lengths to draw: leave it out",
    ),
    (
        "data inspect data/text-char --out bad",
        "--out: these documents have no lengths to draw: leave it out",
    ),
    (
        "data verify data/text-char",
        "action is 'verify'; expected inspect",
    ),
    (
        "data --inspect x",
        "action is 'x'; expected inspect",
    ),
    (
        "prepare bad/no_text.jsonl --out p1",
        "line 1: expected the field 'text', found 'body' (--text_field names",
    ),
    (
        "prepare bad/broken.jsonl --out p2",
        "line 2: expected a JSON object, found no JSON (Expecting value at character",
    ),
    (
        "prepare bad/number.jsonl --out p3",
        "line 1: expected a string in the field 'text', found 3; repair it, or omit",
    ),
    (
        "prepare bad/null.jsonl --out p4",
        "line 1: expected a string in the field 'text', found null; repair it, or",
    ),
    (
        "prepare bad/list.jsonl --out p5",
        "list.jsonl: expected a JSON object on each line, found other JSON: convert it",
    ),
    (
        "prepare bad/x.parquet --out p6",
        "expected Parquet, found damage (Parquet magic bytes not found in footer.",
    ),
    (
        "prepare bad/x.jsonl.zst --out p7",
        "expected intact .zst, found damage (zstd decompressor error: Unknown frame",
    ),
    (
        "prepare bad/x.jsonl.gz --out p8",
        "expected intact .gz, found damage (Not a gzipped file (b'no')); get the",
    ),
    (
        "prepare bad/x.csv --out p9",
        "bad/x.csv: the val split has 1 characters, 1 tokens, and needs 2: give more",
    ),
    (
        "prepare bad/x.pdf --out p10",
        "bad/x.pdf is no text, it begins as PDF: convert it, for example with pdftotext",
    ),
    (
        "prepare my.txt missing.txt",
        "missing.txt: no such file; several sources are files, folders, globs, URLs",
    ),
    (
        "prepare my.txt --tokenizer missing.json",
        "cannot read missing.json: No such file or directory; give the path of a",
    ),
    (
        "prepare my.txt --tokenizer bad/broken_hf/config.json",
        "bad/broken_hf/config.json: expected a tokenizer.json of Hugging Face, found:",
    ),
    (
        "prepare bad/broken_hf/config.json",
        "bad/broken_hf/config.json: expected a JSON object on each line, found other",
    ),
    (
        "prepare my.txt --shuffle 1",
        "my.txt is one text, and shuffle is for documents: leave it out, or give",
    ),
    (
        "prepare my.txt --tokenizer char --out s3://bucket/mine",
        "s3://bucket/mine: Install s3fs to access S3: pip install s3fs",
    ),
    ("prepare my.txt --tokenizer char --out ''", "out is empty; give a value, or leave it out"),
    (
        "prepare my.txt --tokenizer GPT2",
        "no tokenizer is called 'GPT2': choose one of gpt2, o200k_base,",
    ),
    (
        "prepare my.txt --tokenizer gpt-4",
        "no tokenizer is called 'gpt-4': choose one of gpt2, p50k_edit, byte,",
    ),
    (
        "prepare my.txt --tokenizer char --out /dev/null",
        "/dev/null is a file: choose another --out",
    ),
    (
        "prepare my.txt --tokenizer char --out /proc/x",
        "cannot write /proc/x: No such file or directory; check the disk's space and",
    ),
    (
        "prepare my.txt --tokenizer char --val_fraction 0.6 --test_fraction 0.6 --out p11",
        "val_fraction 0.6 and test_fraction 0.6 leave nothing to train on: their sum",
    ),
    (
        "prepare my.txt --tokenizer char --val-frac 0.1",
        "unknown key 'val_frac': did you mean 'val_fraction'?",
    ),
    ("prepare my.txt --tokenizer char --val_fraction ten", "val_fraction is 'ten'; expected float"),
    (
        "prepare my.txt --tokenizer char --shard_tokens 1e8 --out p12",
        "shard_tokens is '1e8'; expected int",
    ),
    (
        "prepare my.txt --tokenizer char --shard_index 0 --out p13",
        "shard_index is 0 and shard_count missing: give --shard_count, the number of",
    ),
    ("prepare my.txt --tokenizer char --merge --out p14", "--merge needs a value: --merge VALUE"),
    ("prepare my.txt --tokenizer char --workers many", "workers is 'many'; expected null, int"),
    ("prepare my.txt --output p15", "unknown key 'output': did you mean 'out'?"),
    ("prepare my.txt --errors ignore", "errors is 'ignore'; expected strict, skip, replace"),
    ("prepare my.txt --split_by random", "split_by is 'random'; expected null, hash, fraction"),
    ("prepare hf:", "hf:: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"),
    ("prepare hf:a/b:c:d:e", "hf:a/b:c:d:e: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"),
    (
        "prepare s3://bucket/x.jsonl",
        "s3://bucket/x.jsonl: Install s3fs to access S3: pip install s3fs",
    ),
    (
        "prepare ftp://127.0.0.1/x.txt",
        "cannot read ftp://127.0.0.1/x.txt: [Errno 111] Connection refused; check",
    ),
    (
        "prepare foo://x.txt",
        "foo://x.txt: Protocol not known: foo: use s3://, gs:// or a folder",
    ),
    (
        "prepare https://nonexistent.invalid/x.txt",
        "cannot read https://nonexistent.invalid/x.txt: Cannot connect to host",
    ),
    ("prepare ''", "source is empty; give a value, or leave it out"),
    (
        "prepare lightning_logs/tiny/version_0",
        "line 1: expected the field 'text', found ",  # of metrics.jsonl or timeline.jsonl
    ),
    ("prepare bad/hf", "bad/hf holds no documents: expected files that end in .jsonl, .jsonl.gz,"),
    (
        "sample lightning_logs/tiny/version_0 --max-new-token 5",
        "unknown key 'max_new_token': did you mean 'max_new_tokens'?",
    ),
    (
        "sample lightning_logs/tiny/version_0 --tokens 5",
        "unknown key 'tokens': did you mean 'max_new_tokens'?",
    ),
    (
        "sample lightning_logs/tiny/version_0 --temp 1",
        "unknown key 'temp': did you mean 'temperature'?",
    ),
    ("sample lightning_logs/tiny/version_0 --n 2", "unknown key 'n': did you mean 'num_samples'?"),
    (
        "sample lightning_logs/tiny/version_0 to be",
        "unknown argument 'to': remove it, or quote the value that it is a part of",
    ),
    (
        "sample lightning_logs/tiny/version_0 --prompt FILE:bad/latin1.txt",
        "--prompt: cannot read bad/latin1.txt: 'utf-8' codec can't decode byte 0xe9",
    ),
    (
        "sample lightning_logs/tiny/version_0 --prompt FILE:bad",
        "--prompt: cannot read bad: [Errno 21] Is a directory: 'bad'",
    ),
    (
        "sample lightning_logs/tiny/version_0 --prompt FILE:",
        "--prompt: cannot read .: [Errno 21] Is a directory: '.'",
    ),
    (
        "sample lightning_logs/tiny/version_0 --temperature nan",
        "temperature is nan; it must be at least 0",
    ),
    (
        "sample lightning_logs/tiny/version_0 --temperature inf",
        "temperature is inf; it must be a finite number",
    ),
    (
        "sample lightning_logs/tiny/version_0 --seed -1",
        "seed is -1; it must be at least 0 and at most 4294967295",
    ),
    (
        "sample lightning_logs/tiny/version_0 --seed 99999999999999999999",
        "seed is 99999999999999999999; it must be at least 0 and at most 4294967295",
    ),
    ("sample lightning_logs/tiny/version_0 --seed abc", "seed is 'abc'; expected int"),
    ("sample lightning_logs/tiny/version_0 --top_k 1.5", "top_k is '1.5'; expected null, int"),
    (
        "sample lightning_logs/tiny/version_0 --device gpu",
        "device is 'gpu'; expected auto, cpu, cuda, mps",
    ),
    (
        "sample lightning_logs/tiny/version_0 --max_new_tokens true",
        "max_new_tokens is 'true'; expected int",
    ),
    (
        "sample lightning_logs/tiny/version_0 --config tiny.yaml",
        "unknown key 'model.config.n_layer'; `gpt-lightning sample --help` lists the",
    ),
    ("sample tiny", "tiny does not exist: give a checkpoint or a run folder, such as"),
    ("sample bad/run_short", "bad/run_short/checkpoints/"),
    ("sample bad/run_empty_file", "bad/run_empty_file/checkpoints/"),
    ("sample bad/run_odd_digest", "bad/run_odd_digest/checkpoints/"),
    (
        "sample bad/run_no_folder",
        "bad/run_no_folder has no checkpoints/*.ckpt: give a checkpoint, or train",
    ),
    (
        "sample bad/run_no_checkpoint",
        "bad/run_no_checkpoint has no checkpoints/*.ckpt: give a checkpoint, or",
    ),
    ("sample bad/run_flipped", "bad/run_flipped/checkpoints/"),
    (
        "sample bad/no_weights.ckpt",
        "bad/no_weights.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "sample bad/future.ckpt",
        "bad/future.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "sample bad/bad_config.ckpt",
        "bad/bad_config.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "sample bad/instantiator.ckpt",
        "bad/instantiator.ckpt is not a checkpoint of gpt-lightning fit, or is",
    ),
    (
        "sample bad/list.ckpt",
        "bad/list.ckpt is not a checkpoint of gpt-lightning fit: it holds an object",
    ),
    (
        "sample bad/module.pt",
        "bad/module.pt is not a checkpoint of gpt-lightning fit, or is damaged (it",
    ),
    (
        "sample bad/state_dict.pt",
        "bad/state_dict.pt is not a checkpoint of gpt-lightning fit: it holds",
    ),
    (
        "sample bad/weights.safetensors",
        "bad/weights.safetensors is damaged, or its content does not match its",
    ),
    ("sample my.txt", "my.txt is not a checkpoint of gpt-lightning fit: it is a text file; give a"),
    (
        "sample data/text-char",
        "data/text-char has no checkpoints/*.ckpt: give a checkpoint, or train one",
    ),
    ("checkpoint verify bad/run_short", "bad/run_short/checkpoints/"),
    ("checkpoint verify bad/run_flipped", "bad/run_flipped/checkpoints/"),
    ("checkpoint verify bad/run_no_digest", "bad/run_no_digest/checkpoints/"),
    ("checkpoint verify bad/run_odd_digest", "bad/run_odd_digest/checkpoints/"),
    ("checkpoint inspect bad/run_flipped", "bad/run_flipped/checkpoints/"),
    (
        "checkpoint inspect bad/future.ckpt",
        "bad/future.ckpt is not a checkpoint of gpt-lightning fit, or is damaged",
    ),
    (
        "checkpoint inspect bad/module.pt",
        "bad/module.pt is not a checkpoint of gpt-lightning fit, or is damaged (it",
    ),
    ("checkpoint inspect", "missing path; `gpt-lightning checkpoint --help` lists the options"),
    (
        "checkpoint inspect a b",
        "unknown argument 'b': remove it, or quote the value that it is a part of",
    ),
    (
        "checkpoint lightning_logs/tiny/version_0",
        "action is 'lightning_logs/tiny/version_0'; expected inspect, verify",
    ),
    ("checkpoint inspect ''", "path is empty; give a value, or leave it out"),
    ("reproduce shakespeare-char-small --steps abc", "steps is 'abc'; expected null, int"),
    (
        "reproduce shakespeare-char-small --rungs ''",
        "rungs is empty; give a value, or leave it out",
    ),
    ("reproduce shakespeare-char-small --steps 1.5", "steps is '1.5'; expected null, int"),
    (
        "reproduce shakespeare-char-small extra",
        "unknown argument 'extra': remove it, or quote the value that it is a part of",
    ),
    (
        "reproduce lecture-ladder --accelerator xpu",
        "--accelerator xpu: this machine has no such device (it has: cpu); use",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init,nope",
        "lecture-ladder has no rung 'nope'; it has overfit-one-batch,",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --steps 5 --lr 3",
        "unknown key 'lr'; `gpt-lightning reproduce --help` lists the options",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --trainer.max_steps abc",
        "trainer.max_steps is 'abc'; expected int",
    ),
    ("bench --foo", "no bench '--foo'; gpt-lightning bench --help lists them"),
    ("bench size", "no bench 'size': did you mean 'sizes'?; gpt-lightning bench --help lists"),
    ("bench sizes --batch_size x", "unknown key 'batch_size': did you mean 'batches'?"),
    ("bench sizes --batch_size 0", "unknown key 'batch_size': did you mean 'batches'?"),
    ("bench sizes --dtype int8", "unknown key 'dtype': did you mean 'dtypes'?"),
    ("bench parallel --work broadcast", "--work is 'broadcast': 'broadcast' is none of all-reduce"),
    ("bench parallel --processes 0", "--processes is '0': 0 is below 1"),
    ("bench parallel --work fsdp2 --processes 1", "no configuration is left to measure"),
    ("bench matmul --sizes -3", "--sizes is '-3': '-3' is none of small, medium, large, xl, 2.7B"),
    (
        "bench generate --checkpoint nope",
        "unknown key 'checkpoint'; `gpt-lightning bench generate --help` lists the",
    ),
    ("bench compare", "missing a, b; `gpt-lightning bench compare --help` lists the options"),
    ("bench compare bad", "missing b; `gpt-lightning bench compare --help` lists the options"),
    (
        "bench compare bad bad",
        "bad/results.json: No such file or directory; give a folder of `bench`,",
    ),
    (
        "bench fit-batch --config tiny.yaml --lr 3",
        "unknown key 'lr'; `gpt-lightning bench fit-batch --help` lists the options",
    ),
    (
        "bench fit-batch tiny.yaml",
        "unknown argument 'tiny.yaml': did you mean '--config tiny.yaml'?",
    ),
    ("bench overhead --steps 0", "steps is 0; it must be at least 1"),
    (
        "bench data --dataset nope",
        "unknown key 'dataset'; `gpt-lightning bench data --help` lists the options",
    ),
    (
        "bench memory --sizes tiny",
        "--sizes is 'tiny': 'tiny' is none of small, medium, large, xl, 2.7B",
    ),
    ("bench ladder --steps abc", "steps is 'abc'; expected int"),
    (
        "doctor --resume --config bad/tabs.yaml",
        "--config bad/tabs.yaml, line 2, column 1: not YAML (found character '\\t'",
    ),
    ("doctor --resume --config tiny.yaml --steps abc", "steps is 'abc'; expected int"),
    (
        "doctor --resume --config tiny.yaml --kills 0",
        "--steps is 20 and --kills 0; they must be at least 4 and 1",
    ),
    (
        "doctor --resume tiny.yaml",
        "unknown argument 'tiny.yaml': did you mean '--config tiny.yaml'?",
    ),
    (
        "doctor --resume --config tiny.yaml --seed -1 --steps 2",
        "--steps is 2 and --kills 3; they must be at least 4 and 1",
    ),
    ("completion Bash", "shell is 'Bash'; expected bash, zsh, fish"),
    (
        "completion bash zsh",
        "unknown argument 'zsh': remove it, or quote the value that it is a part of",
    ),
    ("completion --shell bash", "unknown key 'shell': give the value alone, without --shell"),
    ("configs foo", "unknown argument 'foo': remove it, or quote the value that it is a part of"),
    ("configs --list", "unknown key 'list'; `gpt-lightning configs --help` lists the options"),
    ("fitt", "no command 'fitt': did you mean 'fit'?; gpt-lightning --help lists them"),
    ("training", "no command 'training': did you mean 'fit'?; gpt-lightning --help lists them"),
    ("generate", "no command 'generate': did you mean 'sample'?; gpt-lightning --help lists"),
    ("evaluate", "no command 'evaluate': did you mean 'validate'?; gpt-lightning --help lists"),
    ("eval", "missing path; `gpt-lightning eval --help` lists the options"),
    ("inspect", "no command 'inspect': did you mean 'data'?; gpt-lightning --help lists them"),
    ("resume", "resume has no run: `"),
    ("list", "no command 'list': did you mean 'configs'?; gpt-lightning --help lists them"),
    ("serve", "no command 'serve'; gpt-lightning --help lists them"),
    ("chat", "no command 'chat': did you mean 'sample'?; gpt-lightning --help lists them"),
    ("export", "missing source; `gpt-lightning export --help` lists the options"),
    ("export lightning_logs/tiny", "give --to DIR: the folder to make"),
    ("import gpt2", "give --out FILE.ckpt: the file to write"),
    ("convert", "no command 'convert'; gpt-lightning --help lists them"),
    ("finetune", "no command 'finetune': did you mean 'fit'?; gpt-lightning --help lists them"),
    ("pretrain", "no command 'pretrain': did you mean 'fit'?; gpt-lightning --help lists them"),
    (
        "--config tiny.yaml",
        "no command '--config': the command comes first; gpt-lightning --help lists",
    ),
    ("tiny.yaml", "no command 'tiny.yaml': did you mean `gpt-lightning fit --config tiny.yaml`?"),
    ("-v", "no command '-v': the command comes first; gpt-lightning --help lists them"),
    ("help nope", "no command 'nope'; gpt-lightning --help lists them"),
    ("train tiny.yaml", "no command 'train': did you mean 'fit'?; gpt-lightning --help lists them"),
    (
        "sample CKPT --prompt 'XYZ'",
        "character 'X' at position 0 is not among the 15 characters of the",
    ),
    ("sample CKPT --max_new_tokens 1e3", "max_new_tokens is '1e3'; expected int"),
    ("sample CKPT --top_p 1.5", "top_p is 1.5; it must be above 0 and at most 1"),
    ("sample CKPT --nucleus 0.9", "unknown key 'nucleus': did you mean 'top_p'?"),
    ("sample CKPT --stop", "--stop needs a value: --stop VALUE"),
    ("sample CKPT CKPT", "unknown argument 'lightning_logs/tiny/version_0/checkpoints/"),
    ("sample CKPT --device cuda:0", "device is 'cuda:0'; expected auto, cpu, cuda, mps"),
    ("sample CKPT --dtype float16", "dtype is 'float16'; expected auto, fp32, bf16"),
    (
        "sample --ckpt_path CKPT",
        "expected best, last",
    ),
    ("sample --path CKPT", "unknown key 'path': give the value alone, without --path"),
    ("sample ../nowhere", "../nowhere does not exist: give a checkpoint or a run folder, such as"),
    (
        "sample lightning_logs/tiny/version_999",
        "lightning_logs/tiny/version_999 does not exist: give a checkpoint or a run",
    ),
    (
        "prepare text.txt --tokenizer char --test_fraction 1 --out q1",
        "val_fraction 0.1 and test_fraction 1.0 leave nothing to train on: their sum",
    ),
    (
        "prepare text.txt --tokenizer char --val_fraction nan --out q2",
        "val_fraction is nan; it must be at least 0 and at most 1",
    ),
    (
        "prepare text.txt --tokenizer char --val_fraction -0.1 --out q3",
        "val_fraction is -0.1; it must be at least 0 and at most 1",
    ),
    (
        "prepare text.txt --tokenizer char --shard_tokens -1 --out q4",
        "shard_tokens is -1; it must be at least 1",
    ),
    (
        "prepare text.txt --tokenizer char --shard_tokens 1.5 --out q4",
        "shard_tokens is '1.5'; expected int",
    ),
    (
        "prepare text.txt --tokenizer char --executor slurm --out q5",
        "executor is 'slurm'; expected process, ray",
    ),
    (
        "prepare text.txt --tokenizer char --executor ray --out q5",
        "text.txt is read as a whole by one process: leave out shard_index,",
    ),
    (
        "prepare text.txt --tokenizer char --shard_index 3 --shard_count 2 --out q6",
        "shard_index is 3 and shard_count 2: give --shard_count, the number of jobs,",
    ),
    (
        "prepare text.txt --tokenizer char --shard_index 0 --shard_count 2 --out q6",
        "text.txt is read as a whole by one process: leave out shard_index,",
    ),
    (
        "prepare text.txt --tokenizer char --overwrite maybe --out q7",
        "overwrite is 'maybe'; expected bool",
    ),
    (
        "prepare text.txt --tokenizer char --overwrite --out q7",
        "--overwrite needs a value: --overwrite VALUE",
    ),
    (
        "prepare text.txt --tokenizer char --data_dir ''",
        "data_dir is empty; give a value, or leave it out",
    ),
    (
        "prepare text.txt --tokenizer char --data_dir bad/file",
        "File exists; check the disk's space and permissions, or choose another",
    ),
    (
        "prepare text.txt --tokenizer char --out bad",
        "bad holds anchor.yaml but no manifest.json: choose another --out",
    ),
    (
        "prepare text.txt --tokenizer char --out .",
        ". holds bad but no manifest.json: choose another --out",
    ),
    (
        "prepare text.txt --vocab 50",
        "unknown key 'vocab'; `gpt-lightning prepare --help` lists the options",
    ),
    ("prepare --source text.txt", "unknown key 'source': give the value alone, without --source"),
    (
        "prepare text.txt --tokenizer char --config tiny.yaml",
        "unknown key 'model.config.n_layer'; `gpt-lightning prepare --help` lists",
    ),
    (
        "prepare bad/list.jsonl --tokenizer char --out q8",
        "tokenizer char takes its vocabulary from one text, and documents are",
    ),
    (
        "prepare bad/x.jsonl.bz2",
        "bad/x.jsonl.bz2: no such file, and no corpus of that name; give a text",
    ),
    (
        "prepare file:///etc/hostname-missing.txt",
        "cannot read file:///etc/hostname-missing.txt: no such file; check the",
    ),
    ("prepare hf:a/b/c", "hf:a/b/c: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"),
    ("prepare hf:imdb", "hf:imdb: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or"),
    ("verify data", "data is not a prepared dataset, it has no manifest.json and no shards of"),
    (
        "verify data/text-char/manifest.json",
        "data/text-char/manifest.json is a file; give the folder of a dataset",
    ),
    ("verify --help-me", "unknown key 'help_me': did you mean 'help'?"),
    (
        "data inspect data/text-char data/text-char",
        "unknown argument 'data/text-char': remove it, or quote the value that it is",
    ),
    (
        "data inspect data/text-char --split TRAIN",
        "--split is 'TRAIN', and data/text-char has train, val: choose one",
    ),
    ("data inspect data/text-char --offset 1.5", "offset is '1.5'; expected int"),
    ("data inspect data/text-char --lenght 5", "unknown key 'lenght': did you mean 'length'?"),
    (
        "data show data/text-char",
        "action is 'show'; expected inspect",
    ),
    (
        "checkpoint inspect CKPT --verbose",
        "unknown key 'verbose'; `gpt-lightning checkpoint --help` lists the options",
    ),
    (
        "checkpoint verify my.txt",
        "my.txt has no digest in my.txt.sha256, so it cannot be checked: copy that",
    ),
    ("checkpoint delete CKPT", "action is 'delete'; expected inspect, verify"),
    (
        "checkpoint inspect data",
        "data: no checkpoint there; give one, or a run folder with checkpoints/",
    ),
    (
        "reproduce lecture_ladder",
        "no published table 'lecture_ladder': did you mean 'lecture-ladder'?; there",
    ),
    (
        "reproduce lecture-ladder lecture-ladder",
        "unknown argument 'lecture-ladder': remove it, or quote the value that it is",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --steps many",
        "steps is 'many'; expected null, int",
    ),
    (
        "reproduce lecture-ladder --rungs gpt2-init --accelerator tpu",
        "--accelerator tpu: this machine has no such device (it has: cpu); use",
    ),
    (
        "reproduce lecture-ladder --rung gpt2-init --steps 1",
        "unknown key 'rung': did you mean 'rungs'?",
    ),
    (
        "bench sizes --sizes small,huge",
        "--sizes is 'small,huge': 'huge' is none of small, medium, large, xl, 2.7B",
    ),
    ("bench sizes --steps 1e3", "steps is '1e3'; expected int"),
    ("bench matmul --sizes 0", "--sizes is '0': '0' is none of small, medium, large, xl, 2.7B"),
    ("bench matmul --dtype fp32", "unknown key 'dtype': did you mean 'dtypes'?"),
    ("bench attention --context many", "unknown key 'context': did you mean 'contexts'?"),
    ("bench generate --tokens -1", "tokens is -1; it must be at least 1"),
    ("bench data --workers x", "--workers is 'x': 'x' is no whole number"),
    (
        "bench compare tiny.yaml tiny.yaml",
        "tiny.yaml is no report of `bench` (JSONDecodeError('Expecting value: line 1",
    ),
    (
        "bench fit-batch --config bad/tabs.yaml",
        "--config bad/tabs.yaml, line 2, column 1: not YAML (found character '\\t'",
    ),
    (
        "bench fit-batch --config tiny.yaml --trainer.foo 3",
        "unknown key 'trainer.foo': did you mean 'trainer'?",
    ),
    ("bench help", "no bench 'help'; gpt-lightning bench --help lists them"),
    (
        "bench ladder --config tiny.yaml",
        "model.config.vocab_size is null, but bench ladder reads random tokens: give",
    ),
    (
        "bench profile --config missing.yaml",
        "unknown key 'config'; `gpt-lightning bench profile --help` lists the options",
    ),
    (
        "doctor --resume --config bad/empty.yaml",
        "--config bad/empty.yaml holds no keys: expected YAML such as `trainer:",
    ),
    ("doctor --resume --config tiny.yaml --kill 3", "unknown key 'kill': did you mean 'kills'?"),
    ("doctor --check", "unknown key 'check'; `gpt-lightning doctor --help` lists the options"),
    ("completion tcsh", "shell is 'tcsh'; expected bash, zsh, fish"),
    ("completion ''", "shell is ''; expected bash, zsh, fish"),
    (
        "configs quickstart",
        "unknown argument 'quickstart': remove it, or quote the value that it is a",
    ),
    (
        "FIT --config tiny.yaml",
        "no command 'FIT': did you mean 'fit'?; gpt-lightning --help lists them",
    ),
    (
        "fit.py --config tiny.yaml",
        "no command 'fit.py': did you mean 'fit'?; gpt-lightning --help lists them",
    ),
    ("gpt-lightning fit", "no command 'gpt-lightning'; gpt-lightning --help lists them"),
    ("python fit", "no command 'python'; gpt-lightning --help lists them"),
    ("help me", "no command 'me'; gpt-lightning --help lists them"),
    ("--help me", "no command 'me'; gpt-lightning --help lists them"),
    ("--version --foo", "unknown argument '--foo': --version takes none, remove it"),
    ("version foo", "unknown argument 'foo': version takes none, remove it"),
    ("reproduce --list foo", "unknown argument 'foo': --list takes none, remove it"),
    (
        "reproduce --list --steps 3",
        "unknown argument '--steps': --list takes none, remove it",
    ),
    (
        "fit --config quickstart --data.text_file my.txt",
        "data.corpus and data.text_file given: set exactly one of",
    ),
    (
        "fit --config tiny.yaml --run_name ' '",
        "run_name is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --run_name 'run '",
        "--run_name 'run ': give a folder's name, without /,",
    ),
    ("fit --config tiny.yaml --run_name 'a\tb'", "--run_name 'a\\tb': give a folder's name"),
    ("fit --config tiny.yaml --run_name 'a\nb'", "--run_name 'a\\nb': give a folder's name"),
    (
        "fit --config tiny.yaml --resume lightning_logs/tiny/version_0 --ckpt_path CKPT",
        "--resume lightning_logs/tiny/version_0 continues a run, and --ckpt_path",
    ),
    (
        "fit --config tiny.yaml --resume CKPT --ckpt_path=CKPT",
        "begins a new one from a checkpoint: leave out one of the two",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps 100000000000000000000000",
        "trainer.max_steps is 100000000000000000000000; expected an integer below 2^63",
    ),
    (
        "fit --config tiny.yaml --data.num_workers 9223372036854775808",
        "data.num_workers is 9223372036854775808; expected an integer below 2^63",
    ),
]

# found only when the data are read or the model is made
SLOW = [
    (
        "fit --config tiny.yaml --samples.prompt 日本 --samples.max_new_tokens 3",
        "character '日' at position 0 is not among the 15 characters of the vocabulary:",
    ),
    (
        "validate --config quickstart --ckpt_path CKPT --data.corpus null --data.text_file text.txt",
        "cannot evaluate the checkpoint: model.config.n_layer is 3, the checkpoint's 1;",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/unknown_tokenizer",
        "no tokenizer is called 'nope': choose one of",
    ),
    (
        "fit --config tiny.yaml --checkpoint.folder memory://runs",
        "checkpoint.folder memory://runs would be lost at the end of the process: choose",
    ),
    (
        "fit --config tiny.yaml --checkpoint.folder simplecache::file://far",
        "checkpoint.folder simplecache::file://far would be lost at the end",
    ),
    (
        "fit --config tiny.yaml --checkpoint.folder ' '",
        "checkpoint.folder is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --checkpoint.folder far --checkpoint.enabled false",
        "checkpoint.folder is for copies of checkpoints, and this run saves none: leave it out",
    ),
    (
        "fit --config tiny.yaml --checkpoint.folder far --trainer.enable_checkpointing false",
        "checkpoint.folder is for copies of checkpoints, and this run saves none: leave it out",
    ),
    (
        "fit --config tiny.yaml --resume bad/run_flipped",
        "no checkpoint in bad/run_flipped is whole and of this run (bad/run_flipped/checkpoints",
    ),
    (
        "fit --config tiny.yaml --model.config.n_embd 2000000",
        "model.config has 48,000,094,000,000 parameters, 178,814 GiB in float32, and",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset http://127.0.0.1:9/x",
        "cannot fetch http://127.0.0.1:9/x/manifest.json after 6 attempts (Cannot",
    ),
    (
        "fit --config bad/nan.yaml --config tiny.yaml",
        "model.learning_rate is nan; it must be above 0",
    ),
    (
        "fit --config tiny.yaml --config bad/nan.yaml",
        "model.learning_rate is nan; it must be above 0",
    ),
    (
        "fit --config tiny.yaml --config bad/infinite.yaml",
        "model.learning_rate is inf; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --config bad/infinite_decay.yaml",
        "model.weight_decay is inf; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --config bad/nan_clip.yaml",
        "trainer.gradient_clip_val is nan; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --config bad/null_rate.yaml",
        "model.learning_rate is 'null'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/null_batch.yaml",
        "data.batch_size is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_layers.yaml",
        "model.config.n_layer is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_order.yaml",
        "data.order is 'null'; expected sequential, random, shuffled, repeat, nanogpt",
    ),
    (
        "fit --config tiny.yaml --config bad/null_keep.yaml",
        "checkpoint.keep_last is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_tokens.yaml",
        "samples.max_new_tokens is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_warmup.yaml",
        "speed.warmup_steps is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_seed.yaml",
        "seed_everything is 'null'; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --config bad/null_devices.yaml",
        "trainer.devices is 'null'; expected list, str, int",
    ),
    (
        "fit --config tiny.yaml --config bad/null_config.yaml",
        "model.config is null; expected keys below it, or leave it out",
    ),
    (
        "fit --config tiny.yaml --config bad/null_model.yaml",
        "--config bad/null_model.yaml: no such file or configuration: did you mean",
    ),
    (
        "fit --config tiny.yaml --config bad/null_data.yaml",
        "--config bad/null_data.yaml, line 1: data is empty; expected keys below it,",
    ),
    (
        "fit --config tiny.yaml --config bad/null_samples.yaml",
        "--config bad/null_samples.yaml, line 1: samples is empty; expected keys",
    ),
    (
        "fit --config tiny.yaml --config bad/bool_batch.yaml",
        "data.batch_size is 'true'; expected int",
    ),
    ("fit --config tiny.yaml --data.batch_size true", "data.batch_size is 'true'; expected int"),
    (
        "fit --config tiny.yaml --config bad/float_batch.yaml",
        "data.batch_size is '2.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/float_warmup.yaml",
        "model.warmup_steps is '2.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --model.warmup_steps 2.0",
        "model.warmup_steps is '2.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer 2.0",
        "model.config.n_layer is '2.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer true",
        "model.config.n_layer is 'true'; expected int",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps true",
        "trainer.max_steps is 'true'; expected int",
    ),
    ("fit --config tiny.yaml --config bad/yes.yaml", "trainer.max_steps is 'true'; expected int"),
    (
        "fit --config tiny.yaml --model.learning_rate true",
        "model.learning_rate is 'true'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/list_rate.yaml",
        "model.learning_rate is 'a list'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/mapping_batch.yaml",
        "data.batch_size is 'a dict'; expected int",
    ),
    (
        "fit --config tiny.yaml --config bad/betas3.yaml",
        "model.betas is '[0.9, 0.95, 0.99]'; expected two numbers from 0 to below 1,",
    ),
    (
        "fit --config tiny.yaml --config bad/betas_text.yaml",
        "model.betas is '0.9, 0.95'; expected two numbers from 0 to below 1, such as",
    ),
    (
        "fit --config tiny.yaml --model.betas '[0.9, x]'",
        "model.betas is 'x'; expected two numbers from 0 to below 1, such as [0.9,",
    ),
    (
        "fit --config tiny.yaml --model.betas 0.9 0.95",
        "model.betas is '0.9'; expected two numbers from 0 to below 1, such as [0.9,",
    ),
    (
        "fit --config tiny.yaml --model.betas '{\"a\": 1}'",
        "model.betas is \"{'a': 1}\"; expected two numbers from 0 to below 1, such as",
    ),
    (
        "fit --config bad/object.yaml",
        "--config bad/object.yaml, line 2, column 18: not YAML (could not determine",
    ),
    (
        "fit --config bad/tag.yaml",
        "--config bad/tag.yaml, line 2, column 18: not YAML (could not determine a",
    ),
    (
        "fit --config tiny.yaml --config bad/number_key.yaml",
        "1 is no key: keys are words such as max_steps",
    ),
    (
        "fit --config bad/documents.yaml",
        "--config bad/documents.yaml, line 3, column 1: not YAML (but found another",
    ),
    (
        "fit --config bad/no_colon.yaml",
        "--config bad/no_colon.yaml holds no keys: expected YAML such as `trainer:",
    ),
    (
        "fit --config bad/equals.yaml",
        "--config bad/equals.yaml holds no keys: expected YAML such as `trainer:",
    ),
    (
        "fit --config bad/table.toml",
        "--config bad/table.toml, line 2, column 1: not YAML (expected '<document",
    ),
    (
        "fit --config bad/indent.yaml",
        "--config bad/indent.yaml, line 3, column 11: not YAML (mapping values are",
    ),
    (
        "fit --config bad/unclosed.yaml",
        "--config bad/unclosed.yaml, line 3, column 1: not YAML (found unexpected",
    ),
    (
        "fit --config tiny.yaml --config bad/scalar_model.yaml",
        "--config bad/scalar_model.yaml, line 1: model is gpt2; expected keys below",
    ),
    (
        "fit --config tiny.yaml --config bad/list_trainer.yaml",
        "--config bad/list_trainer.yaml, line 1: trainer is a list; expected keys",
    ),
    (
        "fit --config tiny.yaml --config bad/scalar_data.yaml",
        "--config bad/scalar_data.yaml, line 1: data is tinyshakespeare; expected",
    ),
    (
        "fit --config bad/hf.yaml",
        "unknown key 'per_device_train_batch_size': did you mean 'data.batch_size'?",
    ),
    ("fit --config bad/nano.yaml", "unknown key 'n_layer': did you mean 'model.config.n_layer'?"),
    (
        "fit --config bad/fit_section.yaml",
        "unknown key 'fit.trainer.max_steps': did you mean 'trainer.max_steps'?",
    ),
    ("fit --config bad/include.yaml", "config: File does not exist: '"),
    (
        "fit --config bad/optimizer.yaml",
        "unknown key 'optimizer.init_args.lr': did you mean 'model.learning_rate'?",
    ),
    (
        "fit --config bad/schedule.yaml",
        "unknown key 'lr_scheduler': did you mean 'model.schedule'?",
    ),
    (
        "fit --config tiny.yaml --config bad/callback_name.yaml",
        "trainer.callbacks: EarlyStopping needs monitor: --trainer.callbacks.monitor",
    ),
    (
        "fit --config tiny.yaml --config bad/callback_nowhere.yaml",
        "trainer.callbacks: cannot make nope.Nope: No module named 'nope'",
    ),
    (
        "fit --config tiny.yaml --config bad/callback_arguments.yaml",
        "trainer.callbacks: unknown key 'monitr': did you mean 'monitor'?",
    ),
    (
        "fit --config tiny.yaml --config bad/callback_function.yaml",
        "trainer.callbacks is 'os.system', which is no Callback",
    ),
    (
        "fit --config tiny.yaml --config bad/logger_name.yaml",
        "trainer.logger is 'tensorboard'; expected false, or a class such as",
    ),
    (
        "fit --config tiny.yaml --config bad/logger_list.yaml",
        "trainer.logger is \"['tensorboard', 'csv']\"; expected false, or a class such",
    ),
    (
        "fit --config bad/colons.yaml",
        "--config bad/colons.yaml, line 1, column 21: not YAML (mapping values are",
    ),
    (
        "fit --config bad/anchor.yaml",
        "--config bad/anchor.yaml, line 2, column 18: not YAML (found undefined",
    ),
    (
        "fit --config tiny.yaml --config bad/merge.yaml",
        "unknown key 'base.max_steps': did you mean 'trainer.max_steps'?",
    ),
    (
        "fit --config bad/dup_section.yaml",
        "--config bad/dup_section.yaml, line 3: 'model' is set twice; remove one",
    ),
    (
        "fit --config tiny.yaml --config bad/percent.yaml",
        "data.val_fraction is '10%'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/comma.yaml",
        "model.learning_rate is '0,001'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/kilo.yaml",
        "data.tokens_per_step is '512k'; expected null, int",
    ),
    (
        "fit --config bad/latin1.yaml",
        "--config bad/latin1.yaml is not YAML in UTF-8: byte 0xe9 at offset 13; save",
    ),
    (
        "fit --config bad/control.yaml",
        "--config bad/control.yaml is not YAML: unacceptable character #x0007:",
    ),
    (
        "fit --config bad/binary.yaml",
        "--config bad/binary.yaml is not YAML in UTF-8: byte 0x80 at offset 128;",
    ),
    (
        "fit --config bad/comma.json",
        "--config bad/comma.json, line 1, column 30: not YAML (expected ',' or '}',",
    ),
    (
        "fit --config ''",
        "--config '': no such file or configuration; gpt-lightning configs lists the",
    ),
    (
        "fit --config /nonexistent/dir/x.yaml",
        "--config /nonexistent/dir/x.yaml: no such file or configuration;",
    ),
    (
        "fit --config https://example.com/x.yaml",
        "--config https://example.com/x.yaml: no such file or configuration;",
    ),
    (
        "fit --config tiny",
        "--config tiny: no such file or configuration: did you mean 'tiny.yaml'?;",
    ),
    ("fit -c", "-c/--config needs a value: --config VALUE"),
    (
        "fit -config tiny.yaml",
        "unknown argument '-config': an option begins with two dashes, --config",
    ),
    (
        "fit config=tiny.yaml",
        "unknown argument 'config=tiny.yaml': did you mean '--config=tiny.yaml'?",
    ),
    ("fit --cfg tiny.yaml", "unknown key 'cfg': did you mean 'config'?"),
    (
        "fit --config tiny.yaml max_steps=5",
        "unknown argument 'max_steps=5': did you mean '--trainer.max_steps=5'?",
    ),
    (
        "fit --config tiny.yaml --learning_rate 1e-3",
        "unknown key 'learning_rate': did you mean 'model.learning_rate'?",
    ),
    (
        "fit --config tiny.yaml --learning-rate=1e-3",
        "unknown key 'learning-rate': did you mean 'model.learning_rate'?",
    ),
    ("fit --config tiny.yaml --lr=1e-3", "unknown key 'lr': did you mean 'model.learning_rate'?"),
    (
        "fit --config tiny.yaml --epochs 3",
        "unknown key 'epochs': did you mean 'trainer.max_epochs'?",
    ),
    (
        "fit --config tiny.yaml --num_train_epochs 3",
        "unknown key 'num_train_epochs': did you mean 'trainer.max_epochs'?",
    ),
    (
        "fit --config tiny.yaml --batch-size 4",
        "unknown key 'batch-size': did you mean 'data.batch_size'?",
    ),
    ("fit --config tiny.yaml --bs 4", "unknown key 'bs': did you mean 'data.batch_size'?"),
    (
        "fit --config tiny.yaml --per_device_train_batch_size 4",
        "unknown key 'per_device_train_batch_size': did you mean 'data.batch_size'?",
    ),
    (
        "fit --config tiny.yaml --gradient_accumulation_steps 4",
        "unknown key 'gradient_accumulation_steps': did you mean",
    ),
    (
        "fit --config tiny.yaml --max_iters 10",
        "unknown key 'max_iters': did you mean 'trainer.max_steps'?",
    ),
    ("fit --config tiny.yaml --steps 10", "unknown key 'steps': did you mean 'trainer.max_steps'?"),
    (
        "fit --config tiny.yaml --n_layer 2",
        "unknown key 'n_layer': did you mean 'model.config.n_layer'?",
    ),
    (
        "fit --config tiny.yaml --block_size=64",
        "unknown key 'block_size': did you mean 'model.config.block_size'?",
    ),
    (
        "fit --config tiny.yaml --device=cpu",
        "unknown key 'device': did you mean 'trainer.accelerator'?",
    ),
    (
        "fit --config tiny.yaml --dtype=bfloat16",
        "unknown key 'dtype': did you mean 'trainer.precision'?",
    ),
    (
        "fit --config tiny.yaml --compile=False",
        "unknown key 'compile': did you mean 'model.compile'?",
    ),
    (
        "fit --config tiny.yaml --wandb_log=True",
        "unknown key 'wandb_log': did you mean 'trainer.logger'?",
    ),
    (
        "fit --config tiny.yaml --grad_clip 1.0",
        "unknown key 'grad_clip': did you mean 'trainer.gradient_clip_val'?",
    ),
    (
        "fit --config tiny.yaml --eval_interval 10",
        "unknown key 'eval_interval': did you mean 'trainer.val_check_interval'?",
    ),
    (
        "fit --config tiny.yaml --eval_iters 10",
        "unknown key 'eval_iters': did you mean 'data.eval_batches'?",
    ),
    ("fit --config tiny.yaml --seed 3", "unknown key 'seed': did you mean 'seed_everything'?"),
    (
        "fit --config tiny.yaml --out_dir out",
        "unknown key 'out_dir': did you mean 'trainer.default_root_dir'?",
    ),
    (
        "fit --config tiny.yaml --output_dir out",
        "unknown key 'output_dir': did you mean 'trainer.default_root_dir'?",
    ),
    ("fit --config tiny.yaml --dataset shakespeare", "unknown key 'dataset': did you mean 'data'?"),
    (
        "fit --config tiny.yaml --init_from gpt2",
        "unknown key 'init_from': did you mean 'model.init_from'?",
    ),
    (
        "fit --config tiny.yaml --dropout 0.1",
        "unknown key 'dropout': did you mean 'model.config.dropout'?",
    ),
    (
        "fit --config tiny.yaml --weight_decay 0.1",
        "unknown key 'weight_decay': did you mean 'model.weight_decay'?",
    ),
    (
        "fit --config tiny.yaml --warmup_iters 3",
        "unknown key 'warmup_iters': did you mean 'model.warmup_steps'?",
    ),
    (
        "fit --config tiny.yaml --min_lr 1e-4",
        "unknown key 'min_lr': did you mean 'model.min_learning_rate'?",
    ),
    ("fit --config tiny.yaml --beta2 0.99", "unknown key 'beta2': did you mean 'model.betas'?"),
    ("fit --config tiny.yaml --bf16", "unknown key 'bf16': did you mean 'trainer.precision'?"),
    ("fit --config tiny.yaml --fp16", "unknown key 'fp16': did you mean 'trainer.precision'?"),
    ("fit --config tiny.yaml --gpus 1", "unknown key 'gpus': did you mean 'trainer.devices'?"),
    (
        "fit --config tiny.yaml --num_workers 3",
        "unknown key 'num_workers': did you mean 'data.num_workers'?",
    ),
    (
        "fit --config tiny.yaml --resume_from_checkpoint x",
        "unknown key 'resume_from_checkpoint': did you mean 'resume'?",
    ),
    ("fit --config tiny.yaml --ckpt x.ckpt", "unknown key 'ckpt': did you mean 'ckpt_path'?"),
    ("fit --config tiny.yaml --name myrun", "unknown key 'name': did you mean 'run_name'?"),
    (
        "fit --config tiny.yaml --optimizer adam",
        "unknown key 'optimizer': did you mean 'model.optimizer'?",
    ),
    (
        "fit --config tiny.yaml --model gpt2",
        "model is 'gpt2'; expected keys, such as model.NAME VALUE, or JSON: {\"key\":",
    ),
    (
        "fit --config tiny.yaml --data my.txt",
        "data is 'my.txt'; expected keys, such as data.NAME VALUE, or JSON: {\"key\":",
    ),
    (
        "fit --config tiny.yaml --trainer '{\"max_steps\": 3'",
        "trainer is '{\"max_steps\": 3'; expected keys, such as trainer.NAME VALUE, or",
    ),
    (
        "fit --config tiny.yaml --model '{\"learning_rate\": fast}'",
        "model.learning_rate is 'fast'; expected float",
    ),
    (
        "fit --config tiny.yaml --trainer.max_step 5",
        "unknown key 'trainer.max_step': did you mean 'trainer.max_steps'?",
    ),
    ("fit --config tiny.yaml --trainer.max_steps=", "trainer.max_steps is ''; expected int"),
    (
        "fit --config tiny.yaml --trainer.max_steps 5 6",
        "unknown argument '6': remove it, or quote the value that it is a part of",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps 1e3",
        "trainer.max_steps is '1000.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps 10,000",
        "trainer.max_steps is '10,000'; expected int",
    ),
    (
        "fit --config tiny.yaml --seed_everything 4294967296",
        "seed_everything is 4294967296; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --seed_everything 1.5",
        "seed_everything is '1.5'; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --seed_everything null",
        "seed_everything is 'null'; expected an integer from 0 to 4294967295",
    ),
    (
        "fit --config tiny.yaml --data.seed 99999999999999999999",
        "data.seed is 99999999999999999999; it must be at least 0 and at most",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps 3 --trainer.max_steps 4 --trainer.devices abc",
        "trainer.devices is 'abc'; expected auto, a number of devices, -1 for all",
    ),
    (
        "fit --config tiny.yaml --model.config.vocab_size 0",
        "model.config.vocab_size is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.vocab_size -1",
        "model.config.vocab_size is -1; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.vocab_size 99999999999999",
        "model.config has 3,200,000,000,013,280 parameters, 11,920,929 GiB in",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer 999999999",
        "model.config has 12,287,999,989,216 parameters, 45,776 GiB in float32, and",
    ),
    (
        "fit --config tiny.yaml --model.config.n_embd 1e3",
        "model.config.n_embd is '1000.0'; expected int",
    ),
    (
        "fit --config tiny.yaml --model.config.block_size 0",
        "model.config.block_size is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.dropout -0.1",
        "model.config.dropout is -0.1; it must be at least 0 and below 1",
    ),
    (
        "fit --config tiny.yaml --model.config.bias maybe",
        "model.config.bias is 'maybe'; expected bool",
    ),
    (
        "fit --config tiny.yaml --model.config.n_heads 4",
        "unknown key 'model.config.n_heads': did you mean 'model.config.n_head'?",
    ),
    (
        "fit --config tiny.yaml --model.config small",
        "model.config is 'small'; expected keys, such as model.config.NAME VALUE, or",
    ),
    (
        "fit --config tiny.yaml --model.decay_steps 0",
        "model.warmup_steps 0 must be below model.decay_steps 0: lower",
    ),
    (
        "fit --config tiny.yaml --model.decay_steps -5",
        "the cosine decay has no end: set trainer.max_steps or model.decay_steps, or",
    ),
    (
        "fit --config tiny.yaml --model.weight_decay -0.1",
        "model.weight_decay is -0.1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --model.muon_learning_rate 0",
        "model.muon_learning_rate is 0; it must be above 0",
    ),
    (
        "fit --config tiny.yaml --model.schedule step",
        "model.schedule is 'step'; expected cosine, linear, constant",
    ),
    (
        "fit --config tiny.yaml --model.matmul_precision tf32",
        "model.matmul_precision is 'tf32'; expected highest, high, medium",
    ),
    (
        "fit --config tiny.yaml --model.fused perhaps",
        "model.fused is 'perhaps'; expected bool, auto",
    ),
    (
        "fit --config tiny.yaml --data.cache_limit_gb -1",
        "data.cache_limit_gb is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --data.eval_batch_size 0",
        "data.eval_batch_size is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --data.eval_batches 0",
        "data.eval_batches is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --data.eval_batches 2 --data.eval_train_batches 3",
        "data.eval_train_batches is 3, data.eval_batches 2: the first is a part of the second",
    ),
    (
        "fit --config tiny.yaml --data.eval_train_batches 3",
        "data.eval_train_batches is 3, data.eval_batches null: the first is a part of the second",
    ),
    (
        "fit --config tiny.yaml --data.block_size 64",
        "data.block_size is 64, but model.config.block_size is 32: lower the first",
    ),
    (
        "fit --config tiny.yaml --data.val_fraction nan",
        "data.val_fraction is nan; it must be at least 0 and at most 1",
    ),
    (
        "fit --config tiny.yaml --data.val_fraction -0.5",
        "data.val_fraction is -0.5; it must be at least 0 and at most 1",
    ),
    (
        "fit --config tiny.yaml --data.val_fraction 1e-9",
        "text.txt: the val split has 1 characters, 1 tokens, and needs 2: give more",
    ),
    (
        "fit --config tiny.yaml --data.tokens_per_step 0",
        "data.tokens_per_step is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --data.order nanogpt --data.num_workers 2",
        "data.order nanogpt draws batches of one size from one dataset in the",
    ),
    (
        "fit --config tiny.yaml --data.data_dir ''",
        "data.data_dir is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --data.data_dir bad/file",
        "File exists; check the disk's space and permissions, or choose another",
    ),
    (
        "fit --config tiny.yaml --data.tokenizer ''",
        "data.tokenizer is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --data.tokenizer gpt2 --model.config.vocab_size 65",
        "model.config.vocab_size is 65, but data/text-gpt2 has 50257 tokens: set it",
    ),
    (
        "fit --config tiny.yaml --samples.temperature nan",
        "samples.temperature is nan; it must be at least 0",
    ),
    ("fit --config tiny.yaml --samples.top_k -1", "samples.top_k is -1; it must be at least 1"),
    (
        "fit --config tiny.yaml --samples.num_samples 0",
        "unknown key 'samples.num_samples': did you mean 'samples.seed'?",
    ),
    (
        "fit --config tiny.yaml --samples.every 3",
        "unknown key 'samples.every': did you mean 'samples.seed'?",
    ),
    (
        "fit --config tiny.yaml --checkpoint.every_n_steps 0",
        "checkpoint.every_n_steps is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --checkpoint.every_n_steps -1",
        "checkpoint.every_n_steps is -1; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --checkpoint.keep_best -1",
        "checkpoint.keep_best is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --checkpoint.dirpath x",
        "unknown key 'checkpoint.dirpath': did you mean 'checkpoint.folder'?",
    ),
    (
        "fit --config tiny.yaml --speed.peak_flops nan",
        "peak_flops is 'nan'; use auto, measure, a100 or a positive number of FLOP/s",
    ),
    (
        "fit --config tiny.yaml --speed.peak_flops 0",
        "peak_flops is '0'; use auto, measure, a100 or a positive number of FLOP/s",
    ),
    (
        "fit --config tiny.yaml --speed.warmup_steps 1.5",
        "speed.warmup_steps is '1.5'; expected int",
    ),
    (
        "fit --config tiny.yaml --progress.plain_every_n_steps -1",
        "progress.plain_every_n_steps is -1; it must be at least 1",
    ),
    ("fit --config tiny.yaml --run_name ''", "run_name is empty; give a value, or leave it out"),
    ("fit --config tiny.yaml --run_name .", "--run_name '.': give a folder's name, without /, ..,"),
    (
        "fit --config tiny.yaml --run_name a/b",
        "--run_name 'a/b': give a folder's name, without /, ..,",
    ),
    (
        "fit --config tiny.yaml --run_name aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "cannot write to lightning_logs/",
    ),
    ("fit --config tiny.yaml --resume ''", "resume is empty; give a value, or leave it out"),
    (
        "fit --config tiny.yaml --resume true",
        "--resume true: no whole checkpoint there; give a checkpoint, a run folder,",
    ),
    (
        "fit --config tiny.yaml --resume bad/random.pt",
        "bad/random.pt has no digest in random.pt.sha256, so it cannot be checked:",
    ),
    (
        "fit --config tiny.yaml --resume bad/run_no_folder",
        "--resume bad/run_no_folder: no whole checkpoint there; give a checkpoint, a",
    ),
    (
        "fit --config tiny.yaml --ckpt_path hpc",
        "hpc does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "fit --config tiny.yaml --ckpt_path 3",
        "3 does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator xpu",
        "--trainer.accelerator xpu: this machine has no such device (it has: cpu);",
    ),
    (
        "fit --config tiny.yaml --trainer.accelerator null",
        "trainer.accelerator is null; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --trainer.devices 1.5",
        "trainer.devices is '1.5'; expected auto, a number of devices, -1 for all",
    ),
    (
        "fit --config tiny.yaml --trainer.devices '[0]'",
        "trainer: `devices` selected with `CPUAccelerator` should be an int > 0.",
    ),
    (
        "fit --config tiny.yaml --trainer.devices 0,1",
        "trainer: `devices` selected with `CPUAccelerator` should be an int > 0.",
    ),
    (
        "fit --config tiny.yaml --trainer.devices null",
        "trainer.devices is null; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --trainer.precision bf16mixed",
        "trainer.precision is 'bf16mixed'; expected auto, 32-true, bf16-mixed,",
    ),
    (
        "fit --config tiny.yaml --trainer.precision fp8",
        "trainer.precision is 'fp8'; expected auto, 32-true, bf16-mixed, 16-mixed,",
    ),
    (
        "fit --config tiny.yaml --trainer.precision 8",
        "trainer.precision is '8'; expected auto, 32-true, bf16-mixed, 16-mixed,",
    ),
    (
        "fit --config tiny.yaml --trainer.strategy ''",
        "trainer.strategy is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --trainer.strategy deepspeed",
        "trainer.strategy deepspeed is not supported: expected auto, single_device,",
    ),
    (
        "fit --config tiny.yaml --trainer.max_time 5",
        "trainer.max_time is '5'; expected a time above zero as DD:HH:MM:SS, such as",
    ),
    (
        "fit --config tiny.yaml --trainer.max_time 00:00:00:00",
        "trainer.max_time is '00:00:00:00'; expected a time above zero as",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks LearningRateMonitr",
        "trainer.callbacks is 'LearningRateMonitr'; expected a class of callbacks,",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks EarlyStopping --trainer.callbacks.monitor val_loss",
        "trainer.callbacks: EarlyStopping monitors 'val_loss'; this run logs",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks os.getcwd",
        "trainer.callbacks is 'os.getcwd', which is no Callback",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks '[]' --trainer.callback x",
        "unknown key 'trainer.callback': did you mean 'trainer.callbacks'?",
    ),
    (
        "fit --config tiny.yaml --trainer.logger MLFlowLogger",
        "trainer: mlflow is not installed: pip install 'mlflow>=1.0.0'",
    ),
    (
        "fit --config tiny.yaml --trainer.logger CSVLogger",
        "trainer.logger: CSVLogger needs save_dir: --trainer.logger.save_dir",
    ),
    (
        "fit --config tiny.yaml --trainer.logger CSVLogger --trainer.logger.save_dr x",
        "trainer.logger: unknown key 'save_dr': did you mean 'save_dir'?",
    ),
    (
        "fit --config tiny.yaml --trainer.profiler simpel",
        "trainer.profiler is 'simpel'; expected simple, advanced, pytorch: did you",
    ),
    (
        "fit --config tiny.yaml --trainer.limit_train_batches -1",
        "trainer.limit_train_batches is -1; it must be at least 0",
    ),
    (
        "fit --config tiny.yaml --trainer.check_val_every_n_epoch 0",
        "trainer.check_val_every_n_epoch is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --trainer.default_root_dir ''",
        "trainer.default_root_dir is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --trainer.gradient_clip_val big",
        "trainer.gradient_clip_val is 'big'; expected null, int, float",
    ),
    (
        "fit --config tiny.yaml --trainer.num_nodes -1",
        "trainer.num_nodes is -1; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --trainer.foo.bar 3",
        "unknown key 'trainer.foo.bar': did you mean 'trainer.logger'?",
    ),
    (
        "fit --config tiny.yaml --model.init_from ''",
        "model.init_from is empty; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --model.init_from bad/broken_hf",
        "bad/broken_hf/model.safetensors is damaged, or its content does not match",
    ),
    (
        "fit --config tiny.yaml --model.init_from bad/weights.safetensors",
        "bad/weights.safetensors is damaged, or its content does not match its name",
    ),
    (
        "fit --config tiny.yaml --model.init_from bad/weights.gguf",
        "bad/weights.gguf is not a checkpoint of gpt-lightning fit: it is llama.cpp's",
    ),
    (
        "fit --config tiny.yaml --model.init_from meta-llama/Llama-3",
        "meta-llama/Llama-3 does not exist: give a checkpoint or a run folder",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/not_json",
        "bad/not_json/manifest.json: not valid JSON (Expecting property name",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/empty_manifest",
        "bad/empty_manifest/manifest.json: not valid JSON (Expecting value: line 1",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/list_manifest",
        "bad/list_manifest/manifest.json: version is missing, expected int; make it",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/null_manifest",
        "bad/null_manifest/manifest.json: version is missing, expected int; make it",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/no_keys",
        "bad/no_keys/manifest.json: version is missing, expected int; make it again:",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/dtype",
        "bad/dtype/manifest.json: dtype is float32, but a vocabulary of 15 takes",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/small_vocabulary",
        "bad/small_vocabulary/train-00000.npy: expected only tokens below the",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/text_vocabulary",
        "bad/text_vocabulary/manifest.json: vocab_size is 'many', expected int; make",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/no_splits",
        "bad/no_splits/manifest.json: splits is empty, expected at least one; make",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/future",
        "bad/future/manifest.json: format version 99, this program reads 1; make it",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/no_tokenizer",
        "bad/no_tokenizer/manifest.json: tokenizer is missing, expected dict; make",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/missing_shard",
        "bad/missing_shard/train-00000.npy: expected 14,060 tokens of uint16, found:",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/short_shard",
        "bad/short_shard/train-00000.npy: expected 14,060 tokens of uint16, found:",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/empty_shard",
        "bad/empty_shard/train-00000.npy: expected 14,060 tokens of uint16, found:",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/nano",
        "bad/nano: expected tokens of uint16 in the format nanogpt, found in",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/empty",
        "bad/empty is not a prepared dataset, it has no manifest.json and no shards",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset bad/file",
        "bad/file is a file; give the folder of a dataset",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset ftp://x",
        "cannot fetch ftp://x/manifest.json after 6 attempts ([Errno -2] Name or",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset foo://x",
        "foo://x/manifest.json: Protocol not known: foo: use s3://, gs:// or a folder",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.dataset '*'",
        "data/* is not a prepared dataset, it has no manifest.json and no shards of",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture '{}'",
        "no data given: set exactly one of data.dataset, data.mixture, data.corpus,",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture '[1]'",
        "data.mixture is '[1]'; expected datasets with weights above 0, such as",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture '{\"data/text-char\": nan}'",
        "data.mixture is \"{'data/text-char': 'nan'}\"; expected datasets with weights",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.mixture data/text-char",
        "data.mixture is 'data/text-char'; expected datasets with weights above 0,",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file two words.txt",
        "unknown argument 'words.txt': remove it, or quote the value that it is a",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file bad/x.pdf",
        "bad/x.pdf is no text, it begins as PDF: convert it, for example with pdftotext",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file bad/empty.txt",
        "bad/empty.txt is empty: give it some text",
    ),
    (
        "fit --config tiny.yaml --data.text_file null --data.text_file /dev/null",
        "/dev/null is empty: give it some text",
    ),
    ("validate lightning_logs/tiny lightning_logs/tiny", "unknown argument 'lightning_logs/tiny'"),
    (
        "validate s3://bucket/run",
        "s3://bucket/run is a URL: copy the run folder here, or give --config",
    ),
    ("validate bad/run_no_config", "--config bad/run_no_config/config.yaml: No such file"),
    ("validate data", "data has no checkpoints/*.ckpt: give a checkpoint, or train one"),
    ("predict --ckpt_path last", "predict has no run: `"),
    ("resume nowhere", "nowhere does not exist: give a checkpoint or a run folder, such as"),
    ("resume lightning_logs/tiny --ckpt_path CKPT", "leave out one of the two"),
    ("validate --config tiny.yaml --ckpt_path bad/run_flipped", "bad/run_flipped/checkpoints/"),
    (
        "validate --config tiny.yaml --ckpt_path bad/run_no_folder",
        "bad/run_no_folder has no checkpoints/*.ckpt: give a checkpoint, or train",
    ),
    (
        "validate --config tiny.yaml --ckpt_path auto",
        "auto does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "validate --config tiny.yaml --resume auto",
        "--resume is for fit: give validate --resume never, and --ckpt_path with a",
    ),
    (
        "validate --config tiny.yaml --model.config.n_layer 2 --ckpt_path lightning_logs/tiny/version_0",
        "cannot evaluate the checkpoint: model.config.n_layer is 2, the checkpoint's",
    ),
    (
        "validate --ckpt_path bad/run_no_config",
        "--config bad/run_no_config/config.yaml: No such file or directory; give a YAML file",
    ),
    (
        "predict --ckpt_path lightning_logs/tiny/version_0 --out x",
        "unknown key 'out'; `gpt-lightning predict --help` lists the options",
    ),
    ("fit fit", "unknown argument 'fit': remove it, or quote the value that it is a part of"),
    ("fit validate", "unknown argument 'validate': remove it, or quote the value that it is a"),
    ("fit --", "unknown key ''; `gpt-lightning fit --help` lists the options"),
    ("fit ---config tiny.yaml", "unknown argument '---config': did you mean '--config'?"),
    ("fit --config tiny.yaml --", "unknown key ''; `gpt-lightning fit --help` lists the options"),
    ("fit --config tiny.yaml -x", "unknown key 'x'; `gpt-lightning fit --help` lists the options"),
    (
        "fit --config tiny.yaml --no-compile",
        "unknown key 'no-compile': did you mean 'model.compile'?",
    ),
    (
        "fit --config tiny.yaml --print_confg",
        "unknown key 'print_confg': did you mean 'print_config'?",
    ),
    ("fit --config tiny.yaml --print_config=foo", 'Invalid option "foo" for --print_config'),
    (
        "OMP_NUM_THREADS=abc fit --config tiny.yaml --trainer.max_steps 2",
        "the environment variable OMP_NUM_THREADS is 'abc'; expected a number:",
    ),
    (
        "CUDA_VISIBLE_DEVICES=abc fit --config tiny.yaml --trainer.accelerator gpu",
        "--trainer.accelerator gpu: this machine has no such device (it has: cpu);",
    ),
    (
        "LOCAL_RANK=x fit --config tiny.yaml --trainer.max_steps 2",
        "the environment variable LOCAL_RANK is 'x'; expected a number: correct it",
    ),
    (
        "MASTER_PORT=abc WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost fit --config tiny.yaml --trainer.devices 2",
        "the environment variable MASTER_PORT is 'abc'; expected a number: correct",
    ),
    (
        "SLURM_NTASKS=2 SLURM_JOB_NAME=x fit --config tiny.yaml --trainer.max_steps 2",
        "trainer: You set `--ntasks=2` in your SLURM bash script, but this variable",
    ),
    (
        "fit --config model/gpt2-xl --config tiny.yaml",
        "is an overlay of any run: give the run before it, --config RUN --config",
    ),
    (
        "fit --config ladder/bf16",
        "is an overlay of ladder/matmul-high: give the run before it, --config RUN",
    ),
    (
        "fit --config ../configs/quickstart",
        "--config ../configs/quickstart: no such file or configuration: did you mean",
    ),
    ("fit --config gpt2-124m", "--config gpt2-124m: no such file or configuration: did you mean"),
    ("fit --config gpt2_124M", "--config gpt2_124M: no such file or configuration: did you mean"),
    (
        "fit --config model/gpt2",
        "is an overlay of any run: give the run before it, --config RUN --config",
    ),
    (
        "LOCAL_WORLD_SIZE=2 fit --config tiny.yaml",
        "torchrun has started 2 processes on this machine, but trainer.devices is 1:",
    ),
    (
        "WORLD_SIZE=two fit --config tiny.yaml",
        "the environment variable WORLD_SIZE is 'two'; expected a number: correct it",
    ),
    (
        "RANK=-1 fit --config tiny.yaml",
        "the environment variable RANK is '-1'; expected a number: correct it or",
    ),
    ("fit --config /dev/null", "--config /dev/null is no file; give a YAML file"),
    (
        "fit --config tiny.yaml --data.text_file missing.txt --data.tokens_per_step 1000",
        "data.tokens_per_step 1000 is not a multiple of the 128 tokens of a",
    ),
    (
        "fit --config tiny.yaml --data.text_file bad/latin1.txt --data.tokens_per_step 1000",
        "data.tokens_per_step 1000 is not a multiple of the 128 tokens of a",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate=-1e-3",
        "model.learning_rate is -1e-3; it must be above 0",
    ),
    (
        "fit --config tiny.yaml --model.learning_rate 1e-3e",
        "model.learning_rate is '1e-3e'; expected float",
    ),
    (
        "fit --config tiny.yaml --config bad/float_layers.yaml",
        "model.config.n_layer is '2.0'; expected int",
    ),
    ("fit --config tiny.yaml --data.batch_size '[4]'", "data.batch_size is 'a list'; expected int"),
    ("fit --config tiny.yaml --data.batch_size '{}'", "data.batch_size is 'a dict'; expected int"),
    ("fit --config tiny.yaml --data.batch_size None", "data.batch_size is 'null'; expected int"),
    ("fit --config tiny.yaml --data.batch_size null", "data.batch_size is 'null'; expected int"),
    ("fit --config tiny.yaml --data.batch_size nan", "data.batch_size is 'nan'; expected int"),
    ("fit --config tiny.yaml --data.batch_size 1e1", "data.batch_size is '1e1'; expected int"),
    (
        "fit --config tiny.yaml --model.betas '(0.9, 0.95)'",
        "model.betas is '(0.9, 0.95)'; expected two numbers from 0 to below 1, such",
    ),
    (
        'fit --config tiny.yaml --model.betas \'["a", "b"]\'',
        "model.betas is 'a'; expected two numbers from 0 to below 1, such as [0.9,",
    ),
    (
        "fit --config tiny.yaml --model.betas null",
        "model.betas is 'null'; expected two numbers from 0 to below 1, such as",
    ),
    (
        "fit --config tiny.yaml --model.betas '[0.9, 0.95'",
        "model.betas is '[0.9, 0.95'; expected two numbers from 0 to below 1, such",
    ),
    (
        "fit --config tiny.yaml --model.betas '[nan, 0.9]'",
        "model.betas is nan; it must be at least 0 and below 1",
    ),
    (
        "fit --config tiny.yaml --model null",
        "model is 'null'; expected keys, such as model.NAME VALUE, or JSON: {\"key\":",
    ),
    (
        "fit --config tiny.yaml --trainer null",
        "trainer is 'null'; expected keys, such as trainer.NAME VALUE, or JSON:",
    ),
    (
        "fit --config tiny.yaml --data null",
        "data is 'null'; expected keys, such as data.NAME VALUE, or JSON: {\"key\":",
    ),
    (
        "fit --config tiny.yaml --data.data_dir null",
        "data.data_dir is null; give a value, or leave it out",
    ),
    (
        "fit --config tiny.yaml --trainer.max_steps null",
        "trainer.max_steps is 'null'; expected int",
    ),
    (
        "fit --config tiny.yaml --run_name 'a\\b/c'",
        "--run_name 'a\\\\b/c': give a folder's name, without /, ..,",
    ),
    (
        "fit --config tiny.yaml --run_name ..",
        "--run_name '..': give a folder's name, without /, ..,",
    ),
    (
        "fit --config tiny.yaml --resume never --resume sometimes",
        "--resume sometimes: no whole checkpoint there; give a checkpoint, a run",
    ),
    (
        "fit --config tiny.yaml --ckpt_path data",
        "data has no checkpoints/*.ckpt: give a checkpoint, or train one with",
    ),
    (
        "fit --config tiny.yaml --ckpt_path tiny.yaml",
        "tiny.yaml is not a checkpoint of gpt-lightning fit: it is a text file; give",
    ),
    (
        "fit --config tiny.yaml --model.init_from tiny.yaml",
        "tiny.yaml is not a checkpoint of gpt-lightning fit: it is a text file",
    ),
    (
        "fit --config tiny.yaml --model.init_from lightning_logs",
        "lightning_logs has no checkpoints/*.ckpt: give a checkpoint, or train one",
    ),
    (
        "fit --config tiny.yaml --model.init_from gpt2-xxl",
        "gpt2-xxl does not exist: give a checkpoint or a run folder, such as",
    ),
    (
        "fit --config tiny.yaml --model.config.n_embd 31",
        "model.config.n_embd 31 is not divisible by n_head 2: set",
    ),
    (
        "fit --config tiny.yaml --model.config.n_head 64",
        "model.config.n_embd 32 is not divisible by n_head 64: set",
    ),
    (
        "fit --config tiny.yaml --model.config.loss_chunk 0",
        "model.config.loss_chunk is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --model.config.activation relu",
        "model.config.activation is 'relu'; expected gelu_tanh, gelu",
    ),
    (
        "fit --config tiny.yaml --model.config.init xavier",
        "model.config.init is 'xavier'; expected gpt2, nanogpt, default",
    ),
    (
        "fit --config tiny.yaml --model.config.n_layer 1000000000",
        "model.config has 12,288,000,001,504 parameters, 45,776 GiB in float32, and",
    ),
    (
        "fit --config tiny.yaml --samples.prompt X --samples.max_new_tokens 5",
        "character 'X' at position 0 is not among the 15 characters of the",
    ),
    (
        "fit --config tiny.yaml --samples.temperature inf",
        "samples.temperature is inf; it must be a finite number",
    ),
    (
        "fit --config tiny.yaml --samples.seed -5",
        "samples.seed is -5; it must be at least 0 and at most 4294967295",
    ),
    (
        "fit --config tiny.yaml --speed.peak_flops 1e999",
        "peak_flops is '1e999'; use auto, measure, a100 or a positive number of",
    ),
    (
        "fit --config tiny.yaml --progress.bar true",
        "unknown key 'progress.bar': did you mean 'progress'?",
    ),
    (
        "fit --config tiny.yaml --checkpoint.save_top_k 3",
        "unknown key 'checkpoint.save_top_k': did you mean 'checkpoint.keep_best'?",
    ),
    (
        "fit --config tiny.yaml --checkpoint '{\"keep_last\": 0}'",
        "checkpoint.keep_last is 0; it must be at least 1",
    ),
    (
        "fit --config tiny.yaml --early_stopping true",
        "unknown key 'early_stopping'; `gpt-lightning fit --help` lists the options",
    ),
    (
        "fit --config tiny.yaml --flash_attention",
        "unknown key 'flash_attention'; `gpt-lightning fit --help` lists the options",
    ),
    (
        "fit --config tiny.yaml --model.config.flash true",
        "unknown key 'model.config.flash': did you mean 'model.config.bias'?",
    ),
    (
        "fit --config tiny.yaml --push_to_hub",
        "unknown key 'push_to_hub'; `gpt-lightning fit --help` lists the options",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks EarlyStopping --trainer.callbacks.patience 3",
        "trainer.callbacks: EarlyStopping needs monitor: --trainer.callbacks.monitor",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks EarlyStoping",
        "trainer.callbacks is 'EarlyStoping'; expected a class of callbacks, such as",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks '[\"EarlyStopping\"]'",
        "trainer.callbacks: EarlyStopping needs monitor: --trainer.callbacks.monitor",
    ),
    (
        "fit --config tiny.yaml --trainer.callbacks+=EarlyStopping",
        "trainer.callbacks: EarlyStopping needs monitor: --trainer.callbacks.monitor",
    ),
    (
        "fit --config tiny.yaml --trainer.logger TensorBoard",
        "trainer.logger is 'TensorBoard'; expected false, or a class such as",
    ),
    (
        "fit --config tiny.yaml --trainer.logger TensorBoardLogger",
        "trainer.logger: TensorBoardLogger needs save_dir: --trainer.logger.save_dir",
    ),
    (
        "fit --config tiny.yaml --trainer.profiler.dirpath x",
        "trainer: Profiler: Can't instantiate abstract class Profiler with abstract",
    ),
    (
        "fit tiny.yaml --trainer.max_steps 5",
        "unknown argument 'tiny.yaml': did you mean '--config tiny.yaml'?",
    ),
    (
        "fit -trainer.max_steps 5 --config tiny.yaml",
        "unknown argument '-trainer.max_steps': an option begins with two dashes,",
    ),
    ("fit --trainer.max_steps=5=6 --config tiny.yaml", "trainer.max_steps is '5=6'; expected int"),
    (
        "validate --checkpoint lightning_logs/tiny/version_0",
        "checkpoint is 'lightning_logs/tiny/version_0'; expected keys, such as",
    ),
    (
        "validate lightning_logs/nowhere",
        "lightning_logs/nowhere does not exist: give a checkpoint or a run folder",
    ),
    (
        "test --config tiny.yaml --ckpt_path CKPT",
        "data/text-char has no test split, only train, val: make a dataset with one,",
    ),
    ("fit --help=foo", "--help=foo: expected model, data, speed"),
]
