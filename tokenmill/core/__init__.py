"""The core: who runs next. One loop over scheduler and runner, in a thread or in a process of its own."""
