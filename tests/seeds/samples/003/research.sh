# 003, "Research Training". Changed: module, whose model is a script here; its flags follow --; 2 processes, sizes, 4 steps; no GPUs to name; and the flags of the tables above it.
# Launch distributed training
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --batch-size 8 \
    --learning-rate 3e-4 \
    --epochs 1 \
    --max-steps 4 \
    --mixed-precision \
    --save-interval 2 \
    --gradient-clip-norm 1.0 \
    --no-nccl \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5
