# 003, "Single Node Multi-GPU Training". Changed: module, whose model is a script here; its flags follow --; 2 processes, sizes, 4 steps.
# Basic 4-GPU training
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --batch-size 8 \
    --epochs 1 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5

# With larger model
python -m distributed.cli train --script char_gpt.py \
    --world-size 2 \
    --batch-size 4 \
    --epochs 1 \
    --max-steps 4 \
    -- --hidden-size 64 --attention-heads 4 --layers 3 --vocab-size 64 --max-seq-length 32 --sample-length 5
