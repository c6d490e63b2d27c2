# 004, "ZeRO". Changed: bf16 instead of fp16, no offload and torch's AdamW, as there is no GPU; the rate.
import deepspeed

# DeepSpeed config
ds_config = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "bf16": {
        "enabled": True
    },
    "zero_optimization": {
        "stage": 2  # ZeRO-2: Partition optimizer states + gradients
    },
    "optimizer": {
        "type": "AdamW",
        "params": {
            "torch_adam": True,
            "lr": 1e-2,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01
        }
    }
}

# Initialize DeepSpeed
model_engine, optimizer, train_loader, _ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    training_data=train_dataset,
    config=ds_config
)

# Training loop
for epoch in range(epochs):
    for batch in train_loader:
        loss = model_engine(batch)

        # Backward pass
        model_engine.backward(loss)

        # Optimizer step
        model_engine.step()
