//! The few calls that differ between systems: opening past the page cache, leaving nothing in it, reserving space, huge pages.

#[cfg(target_os = "linux")]
#[path = "platform/linux.rs"]
mod system;
#[cfg(target_vendor = "apple")]
#[path = "platform/macos.rs"]
mod system;
#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
#[path = "platform/unix.rs"]
mod system;

pub(crate) use system::{advise_huge, create_direct, drop_cached, make_buffered, open_direct, reserve};
