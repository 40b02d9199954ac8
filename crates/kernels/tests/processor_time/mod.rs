//! What a process has used of its processors.

use std::time::Duration;

/// Processor time of all threads so far; `None` where `/proc` does not count it.
pub fn processor_time() -> Option<Duration> {
    let nanoseconds = |task: std::io::Result<std::fs::DirEntry>| -> Option<u64> {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse().ok()
    };
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    tasks.map(nanoseconds).sum::<Option<u64>>().map(Duration::from_nanos)
}
