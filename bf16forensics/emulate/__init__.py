"""The torch twin of `floats`: rounding of tensors in one step, and a guarantee that FP32 means FP32."""
