"""Every config key: default, meaning and allowed values, declared once.

Reading this file top to bottom is the manual; `run_net.py --list-keys [PREFIX]` prints it.
Keys that PyCls had keep its name, type, default and meaning, except for the defaults of
DIST_BACKEND, DOWNLOAD_CACHE and OUT_DIR (see their text).
"""

from typing import Any, NamedTuple, Optional, Tuple


class Option(NamedTuple):
    """One config key. `choices` lists what is allowed; `low` and `high` are inclusive bounds, of a list for each entry
    (whole bounds make a list one of whole numbers)."""

    key: str
    default: Any
    meaning: str
    choices: Optional[Tuple] = None
    low: Optional[float] = None
    high: Optional[float] = None


OPTIONS = (
    # ------------------------------------------------------------------- model
    Option("MODEL.TYPE", "", "model family: vit, anynet, regnet, resnet, effnet, or a registered name"),
    Option("MODEL.DEPTH", 0, "number of weight layers (resnet only)", low=0),
    Option("MODEL.NUM_CLASSES", 10, "number of classes", low=1),
    Option("MODEL.LOSS_FUN", "cross_entropy", "loss on soft labels: cross_entropy, or a registered name"),
    Option("MODEL.ACTIVATION_FUN", "relu", "activation of the conv nets", ("relu", "silu", "swish", "gelu")),
    Option("MODEL.ACTIVATION_INPLACE", True, "compute activations in place where possible"),
    Option("MODEL.SCALING_TYPE", "", "compound scaling: d, w, r, g weights as in d1_w8_g8_r1, or letters as in dwr"),
    Option("MODEL.SCALING_FACTOR", 1.0, "flop factor of compound scaling (--mode scale)", low=0.01),
    # --------------------------------------------------------------------- vit
    Option("VIT.STEM_TYPE", "patchify", "patch embedding: one strided conv, or a stack of convs", ("patchify", "conv")),
    Option("VIT.PATCH_SIZE", 16, "side of a patch in pixels (patchify stem)", low=1),
    Option("VIT.C_STEM_KERNELS", [], "kernel size of each conv of the conv stem", low=1),
    Option("VIT.C_STEM_STRIDES", [], "stride of each conv of the conv stem; the product replaces PATCH_SIZE", low=1),
    Option("VIT.C_STEM_DIMS", [], "output channels of each conv of the conv stem", low=1),
    Option("VIT.HIDDEN_DIM", 768, "embedding width", low=1),
    Option("VIT.MLP_DIM", 3072, "hidden width of the MLP", low=1),
    Option("VIT.NUM_HEADS", 12, "attention heads; must divide HIDDEN_DIM", low=1),
    Option("VIT.NUM_LAYERS", 12, "encoder blocks", low=1),
    Option("VIT.CLASSIFIER_TYPE", "token", "classify a class token, or the mean of all tokens", ("token", "pooled")),
    Option(
        "VIT.LAYOUT",
        "batch_second",
        "tensor layout between blocks: (tokens, batch, width) or (batch, tokens, width); same weights and results",
        ("batch_second", "batch_first"),
    ),
    Option(
        "VIT.ATTENTION",
        "auto",
        "torch's scaled_dot_product_attention; matrix products that keep the attention weights (unfused: half the time "
        "of sdpa in bf16 on a CPU); the faster of these two (auto); or the formula, step by step, as reference",
        ("auto", "sdpa", "unfused", "math"),
    ),
    Option(
        "VIT.DROP_PATH", 0.0, "stochastic depth: rate of the last block, rising linearly from 0", low=0.0, high=0.99
    ),
    Option("VIT.LAYER_SCALE", 0.0, "initial value of a learned scale per residual channel (0: none)", low=0.0),
    Option(
        "VIT.POS_EMBED", "learned", "position embedding: learned, or fixed 2-d sines and cosines", ("learned", "sincos")
    ),
    Option("VIT.REGISTERS", 0, "extra learned tokens that the classifier ignores", low=0),
    Option("VIT.QK_NORM", False, "layer norm on queries and keys, per head"),
    # ------------------------------------------------------------------ anynet
    Option("ANYNET.STEM_TYPE", "simple_stem_in", "stem: res_stem_cifar, res_stem_in, simple_stem_in"),
    Option("ANYNET.STEM_W", 32, "stem width", low=1),
    Option("ANYNET.BLOCK_TYPE", "res_bottleneck_block", "block of all stages"),
    Option("ANYNET.DEPTHS", [], "blocks per stage", low=1),
    Option("ANYNET.WIDTHS", [], "width of each stage", low=1),
    Option("ANYNET.STRIDES", [], "stride of each stage's first block", low=1),
    Option("ANYNET.BOT_MULS", [], "bottleneck width over block width, per stage", low=0.01),
    Option("ANYNET.GROUP_WS", [], "group width of the 3x3 conv, per stage", low=1),
    Option("ANYNET.HEAD_W", 0, "width of a 1x1 conv before pooling (0: none)", low=0),
    Option("ANYNET.SE_ON", False, "squeeze-and-excitation in each block"),
    Option("ANYNET.SE_R", 0.25, "squeeze width over block input width", low=0.0),
    # ------------------------------------------------------------------ regnet
    Option("REGNET.STEM_TYPE", "simple_stem_in", "stem, as ANYNET.STEM_TYPE"),
    Option("REGNET.STEM_W", 32, "stem width", low=1),
    Option("REGNET.BLOCK_TYPE", "res_bottleneck_block", "block of all stages"),
    Option("REGNET.STRIDE", 2, "stride of each stage", low=1),
    Option("REGNET.DEPTH", 10, "total number of blocks", low=1),
    Option("REGNET.W0", 32, "initial width (a multiple of 8)", low=1),
    Option("REGNET.WA", 5.0, "slope of the widths", low=0.0),
    Option("REGNET.WM", 2.5, "quantisation of the widths (above 1)"),
    Option("REGNET.GROUP_W", 16, "group width of the 3x3 conv", low=1),
    Option("REGNET.BOT_MUL", 1.0, "bottleneck width over block width", low=0.01),
    Option("REGNET.SE_ON", False, "squeeze-and-excitation in each block (RegNetY)"),
    Option("REGNET.SE_R", 0.25, "squeeze width over block input width", low=0.0),
    Option("REGNET.HEAD_W", 0, "width of a 1x1 conv before pooling (0: none)", low=0),
    # ------------------------------------------------------------------ resnet
    Option("RESNET.TRANS_FUN", "basic_transform", "basic_transform or bottleneck_transform (ImageNet depths)"),
    Option("RESNET.NUM_GROUPS", 1, "groups of the 3x3 conv (1: ResNet, more: ResNeXt)", low=1),
    Option("RESNET.WIDTH_PER_GROUP", 64, "width of each group in the first stage", low=1),
    Option("RESNET.STRIDE_1X1", True, "put the stride on the first 1x1 conv (else on the 3x3)"),
    # ------------------------------------------------------------ efficientnet
    Option("EN.STEM_W", 32, "stem width", low=1),
    Option("EN.DEPTHS", [], "blocks per stage", low=1),
    Option("EN.WIDTHS", [], "width of each stage", low=1),
    Option("EN.EXP_RATIOS", [], "expansion ratio of each stage's MBConv blocks", low=0.01),
    Option("EN.SE_R", 0.25, "squeeze width over block input width", low=0.0),
    Option("EN.STRIDES", [], "stride of each stage's first block", low=1),
    Option("EN.KERNELS", [], "depth-wise kernel size of each stage (odd)", low=1),
    Option("EN.HEAD_W", 1280, "head width", low=1),
    Option("EN.DC_RATIO", 0.0, "drop connect: chance to drop a residual branch", low=0.0, high=0.99),
    Option("EN.DROPOUT_RATIO", 0.0, "dropout before the classifier", low=0.0, high=0.99),
    # ------------------------------------------------------------------- norms
    Option("BN.EPS", 1e-5, "batch norm epsilon", low=0.0),
    Option("BN.MOM", 0.1, "batch norm momentum (weight of the new batch)", low=0.0, high=1.0),
    Option("BN.USE_PRECISE_STATS", True, "recompute batch norm statistics before each test"),
    Option("BN.NUM_SAMPLES_PRECISE", 8192, "training samples used for precise statistics", low=1),
    Option("BN.ZERO_INIT_FINAL_GAMMA", False, "start the last batch norm of each block at 0"),
    Option("BN.USE_CUSTOM_WEIGHT_DECAY", False, "use CUSTOM_WEIGHT_DECAY for batch norms"),
    Option("BN.CUSTOM_WEIGHT_DECAY", 0.0, "weight decay of batch norms", low=0.0),
    Option("BN.SYNC", False, "share batch statistics over all processes (PyCls: per process)"),
    Option("LN.EPS", 1e-5, "layer norm epsilon", low=0.0),
    Option("LN.USE_CUSTOM_WEIGHT_DECAY", False, "use CUSTOM_WEIGHT_DECAY for layer norms"),
    Option("LN.CUSTOM_WEIGHT_DECAY", 0.0, "weight decay of layer norms", low=0.0),
    # --------------------------------------------------------------- optimizer
    Option("OPTIM.OPTIMIZER", "sgd", "optimizer", ("sgd", "adam", "adamw")),
    Option("OPTIM.BASE_LR", 0.1, "learning rate before schedule and warm-up, for the whole global batch", low=0.0),
    Option("OPTIM.LR_POLICY", "cos", "learning rate schedule", ("cos", "lin", "exp", "steps")),
    Option("OPTIM.STEPS", [], "epochs at which the steps policy multiplies by LR_MULT; the first must be 0", low=0),
    Option("OPTIM.LR_MULT", 0.1, "factor of the steps policy", low=0.0),
    Option("OPTIM.MIN_LR", 0.0, "final learning rate relative to BASE_LR", low=0.0, high=1.0),
    Option("OPTIM.MAX_EPOCH", 200, "epochs to train", low=1),
    Option("OPTIM.LR_PER_ITER", False, "follow the schedule at every iteration, not once an epoch as PyCls"),
    Option("OPTIM.WARMUP_EPOCHS", 0, "epochs of linear warm-up", low=0),
    Option("OPTIM.WARMUP_FACTOR", 0.1, "learning rate factor at the start of warm-up", low=0.0, high=1.0),
    Option("OPTIM.WEIGHT_DECAY", 5e-4, "weight decay", low=0.0),
    Option("OPTIM.BIAS_USE_CUSTOM_WEIGHT_DECAY", False, "use BIAS_CUSTOM_WEIGHT_DECAY for biases"),
    Option("OPTIM.BIAS_CUSTOM_WEIGHT_DECAY", 0.0, "weight decay of biases", low=0.0),
    Option(
        "OPTIM.LAYER_DECAY",
        1.0,
        "learning rate factor from each ViT block to the one below (1: none)",
        low=0.0,
        high=1.0,
    ),
    Option("OPTIM.MOMENTUM", 0.9, "SGD momentum", low=0.0),
    Option("OPTIM.DAMPENING", 0.0, "SGD dampening", low=0.0),
    Option("OPTIM.NESTEROV", True, "SGD with Nesterov momentum"),
    Option("OPTIM.BETA1", 0.9, "Adam: decay of the first moment", low=0.0, high=0.999999),
    Option("OPTIM.BETA2", 0.999, "Adam: decay of the second moment", low=0.0, high=0.999999),
    Option("OPTIM.MTA", False, "multi-tensor (foreach) optimizer kernels"),
    Option("OPTIM.FUSED", False, "fused optimizer kernels; wins over MTA"),
    Option("OPTIM.GRAD_CLIP", 0.0, "largest global gradient norm (0: no clipping)", low=0.0),
    Option("OPTIM.ACCUM_ITERS", 1, "split each global batch into this many accumulated passes", low=1),
    Option("OPTIM.EMA_ALPHA", 1e-5, "weight of the new model in the EMA, before scaling by batch and period", low=0.0),
    Option("OPTIM.EMA_UPDATE_PERIOD", 32, "iterations between EMA updates (0: no EMA)", low=0),
    # --------------------------------------------------------------- precision
    Option(
        "PRECISION.MODE",
        "",
        "arithmetic; '' follows TRAIN.MIXED_PRECISION: off fp32, on amp_fp16 (amp_bf16 on the CPU)",
        ("", "fp32", "tf32", "amp_fp16", "amp_bf16", "fp16", "bf16"),
    ),
    Option("PRECISION.LOSS_SCALE", 65536.0, "starting loss scale of fp16", low=1.0),
    Option("PRECISION.GROWTH_INTERVAL", 2000, "steps without overflow before the loss scale doubles", low=1),
    Option("PRECISION.MAX_SKIPPED", 50, "stop after this many skipped steps in a row", low=1),
    Option("PRECISION.NORM_FP32", True, "keep norms in fp32 when weights are 16 bit"),
    Option("PRECISION.REDUCE_DTYPE", "fp32", "dtype of gradient reduction under FSDP", ("fp32", "param")),
    # ---------------------------------------------------------------- training
    Option("TRAIN.DATASET", "", "data set: imagenet, imagefolder, cifar10, digits"),
    Option("TRAIN.SPLIT", "train", "split to train on"),
    Option("TRAIN.BATCH_SIZE", 128, "global batch size over all processes", low=1),
    Option("TRAIN.IM_SIZE", 224, "crop side in pixels, for training and testing", low=1),
    Option("TRAIN.AUTO_RESUME", True, "continue from the newest whole checkpoint in OUT_DIR"),
    Option(
        "TRAIN.CHECKPOINT_ITERS", 0, "also save inside an epoch, every so many iterations (0: only at its end)", low=0
    ),
    Option("TRAIN.CHECKPOINT_ASYNC", False, "write checkpoints beside the training, which waits only for the last one"),
    Option("TRAIN.CHECKPOINT_KEEP", 0, "keep this many epoch checkpoints (0: all); the best is always kept", low=0),
    Option("TRAIN.WEIGHTS", "", "weights to start from: a path or URL of a checkpoint or bare state dict"),
    Option("TRAIN.MIXED_PRECISION", False, "automatic mixed precision, see PRECISION.MODE"),
    Option("TRAIN.LABEL_SMOOTHING", 0.0, "share of the label spread over all classes", low=0.0, high=1.0),
    Option("TRAIN.MIXUP_ALPHA", 0.0, "mixup Beta parameter (0: off)", low=0.0),
    Option("TRAIN.CUTMIX_ALPHA", 0.0, "cutmix Beta parameter (0: off)", low=0.0),
    Option("TRAIN.PCA_STD", 0.1, "strength of PCA lighting noise (0: off)", low=0.0),
    Option("TRAIN.AUGMENT", "", "'', AutoAugment, or a string such as RandAugment_N2_M0.5_P0.5"),
    # ----------------------------------------------------------------- testing
    Option("TEST.DATASET", "", "data set to test on"),
    Option("TEST.SPLIT", "val", "split to test on"),
    Option("TEST.BATCH_SIZE", 200, "global batch size over all processes", low=1),
    Option("TEST.IM_SIZE", 256, "shorter side in pixels before the test crop", low=1),
    Option("TEST.WEIGHTS", "", "weights to test: a path or URL"),
    Option("TEST.SAVE_LOGITS", False, "--mode test: write logits and labels to OUT_DIR/logits.npz"),
    Option("TEST.REPORT", False, "--mode test: write per_class.csv and confusion.png to OUT_DIR"),
    # -------------------------------------------------------------------- data
    Option("DATA_LOADER.MODE", "pytorch", "loader; ffcv is accepted in configs but not available", ("pytorch", "ffcv")),
    Option("DATA_LOADER.NUM_WORKERS", 8, "worker processes per rank (0: load in the training process)", low=0),
    Option("DATA_LOADER.PIN_MEMORY", True, "page-locked memory for faster copies to a GPU"),
    Option("DATA_LOADER.DATA_DIR", "", "folder of the data set ('': pycls/datasets/data/NAME, as PyCls)"),
    Option(
        "DATA_LOADER.SPLIT_FILE",
        "",
        "imagefolder: text file of lines 'split<TAB>relative/path' that assigns pictures to splits",
    ),
    Option("DATA_LOADER.PREFETCH", 2, "batches that each worker loads ahead", low=1),
    Option("DATA_LOADER.WORKER_THREADS", 1, "threads that torch may use in each worker", low=1),
    Option(
        "DATA_LOADER.START_METHOD",
        "",
        "how workers start ('': the platform's default)",
        ("", "fork", "spawn", "forkserver"),
    ),
    Option(
        "DATA_LOADER.PIXELS",
        "float32",
        "how pictures of imagefolder and imagenet travel to the device: normalised, exactly as in PyCls, or as bytes, "
        "faster, rounded to 1/255 and normalised there",
        ("float32", "uint8"),
    ),
    Option("DATA_LOADER.DECODER", "opencv", "picture decoder: opencv (as PyCls) or pillow", ("opencv", "pillow")),
    Option(
        "DATA_LOADER.ON_BAD_IMAGE",
        "stop",
        "an unreadable picture: stop the run, or warn and train on the next one instead (testing leaves it out)",
        ("stop", "replace"),
    ),
    Option(
        "DATA_LOADER.CHANNEL_ORDER",
        "auto",
        "order of the input channels; auto: bgr for imagenet and imagefolder (as PyCls), rgb for cifar10, digits",
        ("auto", "bgr", "rgb"),
    ),
    # ---------------------------------------------------- devices and processes
    Option("DEVICE", "auto", "auto takes CUDA when there is one", ("auto", "cuda", "cpu")),
    Option("NUM_GPUS", 1, "number of processes over all machines: GPUs, or gloo ranks on the CPU", low=1),
    Option("MAX_GPUS_PER_NODE", 8, "most processes on one machine", low=1),
    Option("DIST_BACKEND", "auto", "collectives; auto follows the device (PyCls: nccl)", ("auto", "nccl", "gloo")),
    Option(
        "DIST_TIMEOUT",
        1800.0,
        "seconds for which a process waits for another in a collective; must be more than writing a checkpoint takes. "
        "Until the first step is done (data sets listed, models compiled) it is at least 1800",
        low=5.0,
        high=86400.0,
    ),
    Option("HOST", "localhost", "accepted as in PyCls and not used: local processes meet on the loopback interface"),
    Option("PORT_RANGE", [10000, 65000], "accepted as in PyCls and not used: the system picks a free port"),
    Option("RNG_SEED", 1, "seed of everything random", low=0, high=2**63 - 1),
    Option(
        "CUDNN.BENCHMARK",
        True,
        "let cuDNN choose the fastest algorithms; results may differ in rounding from run to run",
    ),
    Option("FSDP.ENABLED", False, "shard weights, gradients and optimizer state over the processes"),
    Option(
        "FSDP.BACKEND", "torch", "PyTorch's fully_shard, or FairScale's FSDP as PyCls used it", ("torch", "fairscale")
    ),
    Option(
        "FSDP.RESHARD_AFTER_FW", True, "free gathered weights after the forward pass (less memory, more communication)"
    ),
    Option("FSDP.LAYER_NORM_FP32", True, "compute layer norms in fp32"),
    Option("FSDP.SHARD_SIZE", 0, "processes that share one copy of the weights (0: all of them)", low=0),
    Option("FSDP.CPU_OFFLOAD", False, "keep sharded weights in host memory"),
    Option("FSDP.STATE", "full", "checkpoints: one file, or a folder of shards", ("full", "sharded")),
    Option("COMPILE.ENABLED", False, "torch.compile the repeated blocks"),
    Option(
        "COMPILE.MODE",
        "default",
        "torch.compile mode",
        ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    ),
    Option(
        "ACT_CHECKPOINT",
        "none",
        "recompute activations in backward: of whole blocks, or of all but matrix products",
        ("none", "block", "selective"),
    ),
    # -------------------------------------------------------------- timing mode
    Option("PREC_TIME.WARMUP_ITER", 3, "iterations left out of each timing", low=0),
    Option("PREC_TIME.NUM_ITER", 30, "iterations timed", low=1),
    Option("TIME.TRAIN_ONLY", False, "time neither testing nor the loader"),
    Option("TIME.SWEEP_BATCH", False, "also time doubled batches: the largest that fits, and the fastest"),
    # ------------------------------------------------------------------- launch
    Option(
        "LAUNCH.MODE",
        "local",
        "where to run: here, in a SLURM job, or as such a job but on this machine (to try it)",
        ("local", "submitit_local", "slurm"),
    ),
    Option("LAUNCH.FOLLOW", False, "after submission, follow the job's log and states until it ends"),
    Option("LAUNCH.FOLDER", "", "folder of job files and logs, seen by all nodes ('': OUT_DIR/jobs)"),
    Option("LAUNCH.MAX_RETRY", 3, "restarts after a time-out or pre-emption", low=0),
    Option(
        "LAUNCH.SIGNAL_DELAY",
        120,
        "seconds before the time limit at which a job is told to save; longer than LOG_PERIOD steps and than testing",
        low=1,
    ),
    Option("LAUNCH.NAME", "pycls_job", "job name"),
    Option("LAUNCH.COMMENT", "", "job comment"),
    Option("LAUNCH.CPUS_PER_GPU", 10, "CPU cores per process", low=1),
    Option("LAUNCH.MEM_PER_GPU", 60, "memory per process in GB", low=1),
    Option("LAUNCH.PARTITION", "devlab", "SLURM partition ('': the cluster's default)"),
    Option(
        "LAUNCH.GPU_TYPE",
        "volta",
        "of jobs with GPUs: the feature that nodes must have (SLURM's constraint), or gpu:TYPE; '' for any",
    ),
    Option("LAUNCH.TIME_LIMIT", 4200, "time limit in minutes", low=1),
    Option("LAUNCH.EMAIL", "", "address for SLURM mails"),
    # ------------------------------------------------------------ files and logs
    Option("OUT_DIR", "", "output folder ('': output/CONFIG_NAME; PyCls: /tmp)"),
    Option("CFG_DEST", "config.yaml", "name of the merged config written to OUT_DIR"),
    Option("LOG_DEST", "stdout", "stdout, or only the file OUT_DIR/stdout.log", ("stdout", "file")),
    Option("LOG_PERIOD", 10, "iterations between log records", low=1),
    Option("LOG.PROGRESS", True, "progress bar when standard error is a terminal"),
    Option("LOG.TENSORBOARD", False, "write TensorBoard scalars to OUT_DIR/tensorboard"),
    Option("LOG.PLOT", True, "draw learning curves to OUT_DIR/curves.png at the end of training"),
    Option("VERBOSE", True, "log the model and its complexity (also on small runs)"),
    Option("DESC", "", "a note about the run"),
    Option("DOWNLOAD_CACHE", "", "folder of downloaded weights ('': pycls in the user's cache folder)"),
)

# Keys that PyCls removed: accepted with a warning, so that configs from 2020 still load.
DEPRECATED = (
    "MEM",
    "MEM.RELU_INPLACE",
    "OPTIM.GAMMA",
    "PREC_TIME.BATCH_SIZE",
    "PREC_TIME.ENABLED",
    "PORT",
    "TRAIN.EVAL_PERIOD",
    "TRAIN.CHECKPOINT_PERIOD",
)
