{
  outputs = _: { };
}
