# 003, "Memory Optimization". Changed: module, whose model is a script here; its flags follow --; 2 processes, sizes, 4 steps.
# Enable gradient checkpointing
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --use-gradient-checkpointing \
    --batch-size 8 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5

# Use mixed precision
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --mixed-precision \
    --batch-size 16 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5
