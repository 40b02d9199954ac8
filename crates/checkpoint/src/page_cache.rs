//! Shards are read past the page cache; what is read or written through it should not stay there.

use std::fs::File;

/// Says that reads will be few and scattered, so that nothing is read ahead.
pub(crate) fn no_read_ahead(file: &File) {
    advise(file, Advice::Random);
}

/// Drops a file's clean pages from the page cache.
pub(crate) fn forget_pages(file: &File) {
    advise(file, Advice::DontNeed);
}

#[cfg(target_os = "linux")]
use rustix::fs::Advice;

#[cfg(target_os = "linux")]
fn advise(file: &File, advice: Advice) {
    // Advice only: a refusal costs memory for a while, nothing else.
    let _ = rustix::fs::fadvise(file, 0, None, advice);
}

#[cfg(not(target_os = "linux"))]
enum Advice {
    Random,
    DontNeed,
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &File, _: Advice) {}
