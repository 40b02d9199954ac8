//! The few calls that differ between systems: opening past the page cache, leaving nothing in it, reserving space, huge pages,
//! facts about devices.

#[cfg(target_os = "linux")]
#[path = "platform/linux.rs"]
mod system;
#[cfg(target_vendor = "apple")]
#[path = "platform/macos.rs"]
mod system;
#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
#[path = "platform/unix.rs"]
mod system;

pub(crate) use system::{
    advise_huge, block_device, create_direct, drop_cached, make_buffered, mount_of, open_direct, reserve,
};

/// What the system tells about a block device.
#[derive(Debug, Default, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux tells"))]
pub(crate) struct BlockDevice {
    pub(crate) name: String,
    /// The disk that the device is a part of, or the device itself.
    pub(crate) disk: String,
    pub(crate) model: Option<String>,
    pub(crate) serial: Option<String>,
    pub(crate) size_bytes: Option<u64>,
}

/// What the system tells about the file system that a folder is in.
#[derive(Debug, PartialEq, Eq)]
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux tells"))]
pub(crate) struct Mount {
    pub(crate) file_system: String,
    /// The device, server or whatever else is mounted.
    pub(crate) source: String,
}
