"""The integer forward as an ONNX graph of standard operators, and onnxruntime's numbers beside the test vectors."""
