"""Publishers: each puts claimed messages on one kind of broker and says what became of every one."""
