"""The keys of DeepSpeed's config as text, one a line; `tables` says how a line reads.

Read off the pydantic models and the `get_*` readers of DeepSpeed's releases 0.14.0 to 0.19.8 (their source
archives on PyPI); a test compares them with the installed release.
"""

TABLES = """
[.]
train_batch_size                    any
train_micro_batch_size_per_gpu      any
gradient_accumulation_steps         any
managed_gradient_accumulation       bool        since=0.19.4
steps_per_print                     int
dump_state                          bool
disable_python_gc                   bool        since=0.19.8
disable_allgather                   bool
communication_data_type             any         until=0.14.0
communication_data_type             data_type   refused     since=0.14.1
seq_parallel_comm_data_type         data_type   refused     until=0.16.4
seq_parallel_communication_data_type data_type  refused     since=0.16.5
prescale_gradients                  bool
gradient_predivide_factor           float
gradient_allreduce_op               reduce_op   refused     since=0.19.6
gradient_clipping                   float
zero_optimization                   {}
allgather_size                      int
zero_allow_untested_optimizer       bool
zero_force_ds_cpu_optimizer         bool
fp16                                {}
bf16                                {}
bfloat16                            {}
torch_autocast                      {}          since=0.17.2
data_types                          {}
optimizer                           {}
scheduler                           {}
activation_checkpointing            {}
comms_logger                        {}
tensorboard                         {}
wandb                               {}
csv_monitor                         {}
comet                               {}          since=0.14.3
flops_profiler                      {}
autotuning                          {}
wall_clock_breakdown                flag        refused
memory_breakdown                    bool
use_data_before_expert_parallelism  bool
hybrid_engine                       {}
pipeline                            {}
data_efficiency                     {}
checkpoint                          {}
datastates_ckpt                     any         since=0.18.1
aio                                 {}
dataloader_drop_last                bool
log_level                           any         since=0.19.3
weight_quantization                 {}
compile                             {}          until=0.14.3
compile                             {}          since=0.16.6
timers                              {}          since=0.14.3
tensor_parallel                     {}          since=0.16.4
expert_parallel                     {}          since=0.19.2
sequence_parallel_size              int         since=0.15.0
data_parallel_size                  int         since=0.15.0
vocabulary_size                     countable   refused
nebula                              any         until=0.19.6 gone=refused
compression_training                any         until=0.19.6 gone=refused
quantize_training                   any         until=0.19.6 gone=refused
sparse_attention                    any         until=0.19.6 gone=refused
amp                                 any         until=0.19.7 gone=refused
sparse_gradients                    any         until=0.19.7 gone=refused
eigenvalue                          any         until=0.19.7 gone=refused
elasticity                          any         until=0.19.7 gone=refused
graph_harvesting                    any         until=0.19.7 gone=refused
curriculum_learning                 any         until=0.19.7 gone=refused
progressive_layer_drop              any         until=0.19.7 gone=refused

[zero_optimization model]
stage                               stage
contiguous_gradients                bool
reduce_scatter                      bool
reduce_bucket_size                  int         >=0 until=0.19.5
reduce_bucket_size                  int         >0  since=0.19.6
use_multi_rank_bucket_allreduce     bool
allgather_partitions                bool
allgather_bucket_size               int         >=0
overlap_comm                        bool?
compute_grad_norm                   bool        since=0.19.7
load_from_fp32_weights              bool
elastic_checkpoint                  bool
offload_param                       {}
offload_optimizer                   {}
zenflow                             {}          since=0.17.5
sub_group_size                      int         >=0
cpu_offload_param                   bool?       replaced=offload_param
cpu_offload_use_pin_memory          bool?
cpu_offload                         bool?       replaced=offload_optimizer
prefetch_bucket_size                int         >=0 alias=stage3_prefetch_bucket_size
param_persistence_threshold         int         >=0 alias=stage3_param_persistence_threshold
model_persistence_threshold         int         >=0 alias=stage3_model_persistence_threshold
max_live_parameters                 int         >=0 alias=stage3_max_live_parameters
max_reuse_distance                  int         >=0 alias=stage3_max_reuse_distance
gather_16bit_weights_on_model_save  bool        alias=stage3_gather_16bit_weights_on_model_save
module_granularity_threshold        int         alias=stage3_module_granularity_threshold since=0.16.0
use_all_reduce_for_fetch_params     bool        alias=stage3_use_all_reduce_for_fetch_params since=0.14.3
allgather_sequential                bool        alias=stage3_allgather_sequential since=0.18.5
stage3_gather_fp16_weights_on_model_save bool   replaced=gather_16bit_weights_on_model_save
ignore_unused_parameters            bool
legacy_stage1                       bool
round_robin_gradients               bool
parameter_alignment                 bool        since=0.19.7
zero_hpz_partition_size             int         >=0
zero_quantized_weights              bool
zero_quantized_nontrainable_weights bool
zero_quantized_gradients            bool
mics_shard_size                     int         until=0.19.6 gone=refused
mics_hierarchical_params_gather     bool        until=0.19.6 gone=refused
zeropp_loco_param                   dict?       since=0.16.2 until=0.19.7 gone=refused
memory_efficient_linear             bool
pipeline_loading_checkpoint         bool
override_module_apply               bool
log_trace_cache_warnings            bool        since=0.16.4
enable_sanity_checks                bool        since=0.17.6
save_muon_momentum_buffer_in_memory bool        since=0.18.9
leaf_module                         {}          since=0.18.0

[zero_optimization.offload_param model optional]
device                              one:none|cpu|nvme
nvme_path                           path?
buffer_count                        int         >=0
buffer_size                         int         >=0
max_in_cpu                          int         >=0
pin_memory                          bool

[zero_optimization.offload_optimizer model optional]
device                              one:none|cpu|nvme
nvme_path                           path?
buffer_count                        int         >=0
pin_memory                          bool
pipeline_read                       bool
pipeline_write                      bool
fast_init                           bool
ratio                               float       >=0 <=1
super_offload                       bool        since=0.18.0
cpuadam_cores_perc                  float       >=0 <=1 since=0.18.0

[zero_optimization.zenflow model optional]
topk_ratio                          float       >=0 <=1 until=0.19.5
topk_ratio                          float       >0 <1   since=0.19.6
select_strategy                     one:auto|step|epoch
select_interval                     interval
update_interval                     interval    until=0.19.5
update_interval                     interval    >0      since=0.19.6
overlap_step                        bool
offload                             bool
auto_ratio                          float       >=0 <=1
full_warm_up_rounds                 int
pt_reserved_cores_perc              float       >=0 <=1 since=0.17.6
steps_per_epoch                     int?

[zero_optimization.leaf_module model optional]
classes                             words
names                               words
name_suffixes                       words

[fp16 model=0.17.1]
enabled                             bool
auto_cast                           bool
loss_scale                          float       until=0.18.7
loss_scale                          loss_scale  since=0.18.8
initial_scale_power                 int
loss_scale_window                   int         until=0.19.2
loss_scale_window                   plain_int   since=0.19.3
hysteresis                          int
consecutive_hysteresis              bool
min_loss_scale                      int         until=0.19.2
min_loss_scale                      plain_int   since=0.19.3
fp16_master_weights_and_grads       bool

[bf16 model=0.17.1 optional]
enabled                             bool
immediate_grad_update               bool
check_grad_overflow                 bool        since=0.17.1
bf16_master_weights_and_grads       bool        since=0.18.3
bf16_optimizer_states               bool        since=0.18.3

[torch_autocast]
enabled                             bool
dtype                               torch_type  refused
lower_precision_safe_modules        names       refused

[data_types]
grad_accum_dtype                    any
param_dtype                         any         since=0.19.2
buffer_dtype                        any         since=0.19.2
keep_in_fp32_modules                name_list   refused since=0.19.8

[optimizer]
type                                str?        refused
params                              {}
legacy_fusion                       bool

[optimizer.params optional open]
lr                                  float
weight_decay                        float
eps                                 float
max_grad_norm                       comparable  refused

[scheduler]
type                                str?
params                              {}

[scheduler.params optional open]
warmup_min_lr                       float
warmup_max_lr                       float
warmup_num_steps                    int
total_num_steps                     int

[activation_checkpointing]
partition_activations               bool
number_checkpoints                  int?
contiguous_memory_optimization      bool
synchronize_checkpoint_boundary     bool
cpu_checkpointing                   bool
profile                             bool

[comms_logger model]
enabled                             bool
prof_all                            bool
prof_ops                            list
verbose                             bool
debug                               bool

[tensorboard model]
enabled                             bool
output_path                         str
job_name                            str

[wandb model]
enabled                             bool
group                               str?
team                                str?
project                             str

[csv_monitor model]
enabled                             bool
output_path                         str
job_name                            str

[comet model]
enabled                             bool
samples_log_interval                int
project                             str?
workspace                           str?
api_key                             str?
experiment_name                     str?
experiment_key                      str?
online                              bool?
mode                                str?

[flops_profiler]
enabled                             flag        refused
recompute_fwd_factor                float
profile_step                        int
module_depth                        int
top_modules                         int
detailed                            bool
output_file                         str?

[autotuning]
enabled                             bool
fast                                bool
results_dir                         filled      refused
exps_dir                            filled      refused
overwrite                           bool
start_profile_step                  int
end_profile_step                    int
metric                              str
metric_path                         str?
tuner_type                          str
tuner_early_stopping                int
tuner_num_trials                    int
arg_mappings                        dict?
model_info                          dict?       refused
model_info_path                     str?
mp_size                             int
max_train_batch_size                int?
min_train_batch_size                int
max_train_micro_batch_size_per_gpu  int
min_train_micro_batch_size_per_gpu  int
num_tuning_micro_batch_sizes        int

[hybrid_engine model]
enabled                             bool
max_out_tokens                      int         until=0.19.6
max_out_tokens                      int         >0 since=0.19.7
inference_tp_size                   int
release_inference_cache             bool
pin_parameters                      bool
tp_gather_partition_size            int
enable_cuda_graph                   bool        since=0.19.6

[pipeline open]
stages                              any

[data_efficiency]
enabled                             bool
seed                                int
data_sampling                       {}
data_routing                        {}

[data_efficiency.data_sampling]
enabled                             bool
num_epochs                          int
num_workers                         int
pin_memory                          bool        since=0.16.5
curriculum_learning                 {}
dynamic_batching                    {}          since=0.16.5

[data_efficiency.data_sampling.curriculum_learning open]
enabled                             bool

[data_efficiency.data_sampling.dynamic_batching open]
enabled                             bool

[data_efficiency.data_routing]
enabled                             bool
random_ltd                          {}

[data_efficiency.data_routing.random_ltd open]
enabled                             bool

[checkpoint]
tag_validation                      tag_mode    refused
load_universal                      bool
use_node_local_storage              bool
parallel_write                      {}
checkpoint_serialization            bool        since=0.17.1
writer                              {}          since=0.17.1

[checkpoint.parallel_write]
pipeline_stage                      true_false  refused

[checkpoint.writer optional]
type                                writer?     refused
io_buffer_size                      float
io_buffer_double                    bool
show_statistics                     bool
data_parallel                       writers?    refused
decoupled                           bool
io_multiplier                       float

[aio optional]
block_size                          int
queue_depth                         int
thread_count                        int         until=0.16.3
intra_op_parallelism                int         since=0.16.4
single_submit                       bool
overlap_events                      bool
use_gds                             bool        since=0.15.0

[weight_quantization model]
enabled                             bool
num_bits                            int
q_type                              one:asymmetric|symmetric
q_groups                            int
quantized_initialization            dict
post_init_quant                     dict

[compile model]
enabled                             bool        until=0.14.3
backend                             str         until=0.14.3
kwargs                              dict        until=0.14.3
deepcompile                         bool        since=0.16.6
autoep_non_moe                      bool        since=0.19.8
free_activation                     bool        since=0.16.6
free_activation_threshold           int         since=0.18.0
offload_activation                  bool        since=0.16.6
offload_activation_pin_memory       bool        since=0.19.6
offload_opt_states                  bool        since=0.16.6
double_buffer                       bool        since=0.16.6
symmetric_memory                    bool        since=0.16.6
debug_log                           bool        since=0.16.6
offload_parameters                  bool        since=0.16.6
sync_before_reduce                  bool        since=0.16.6
sync_after_reduce                   bool        since=0.16.6
sync_before_allgather               bool        since=0.16.6
sync_after_allgather                bool        since=0.16.6
keep_int_input_tensors              bool        since=0.17.2
keep_all_input_tensors              bool        since=0.17.2
passes                              some:z1|z3|autosp?         since=0.18.9 until=0.19.5
passes                              some:z1|z3|autosp|autotp?  since=0.19.6

[timers]
throughput                          {}

[timers.throughput model]
enabled                             bool
synchronized                        bool

[tensor_parallel model]
dtype                               never
autotp_size                         int
tp_overlap_comm                     bool        since=0.16.6
vocab_parallel_lm_head              bool?       since=0.19.8
vocab_parallel_ce_backend           one:torch|liger since=0.19.8
tensor_parallel                     {}          alias=tp
injection_policy_tuple              list?
partition_config                    dict?       since=0.18.6
preset_model                        str?        since=0.18.6
keep_module_on_host                 bool
replace_with_kernel_inject          bool        alias=kernel_inject

[tensor_parallel.tensor_parallel model]
tp_size                             int
tp_grain_size                       int
mpu                                 any
tp_group                            any

[expert_parallel open]
load_balance_coeff                  nothing     refused
"""
