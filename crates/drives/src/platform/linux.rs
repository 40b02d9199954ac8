//! Linux: O_DIRECT, posix_fadvise, transparent huge pages, sysfs and mountinfo.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use memmap2::{Advice, MmapMut};
use rustix::fs::{self, Mode, OFlags};
use rustix::io::Errno;

use super::{BlockDevice, Mount};

/// sysfs counts sizes in these units, whatever the device's own sectors are.
const SYSFS_SECTOR_BYTES: u64 = 512;

const HUGE_PAGE_SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Opens for reading past the page cache. EINVAL means that the file system refuses direct reads.
pub(crate) fn open_direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT;
    Ok(File::from(fs::open(path, flags, Mode::empty())?))
}

/// Turns direct reads of an open file off. Read-ahead goes too: it would leave pages behind that nobody asked for.
pub(crate) fn make_buffered(file: &File) -> io::Result<()> {
    fs::fcntl_setfl(file, fs::fcntl_getfl(file)? - OFlags::DIRECT)?;
    fs::fadvise(file, 0, None, fs::Advice::Random)?;
    Ok(())
}

/// Opens for writing past the page cache, and makes the file if it is not there; buffered where the file system refuses.
pub(crate) fn create_direct(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    match fs::open(path, flags | OFlags::DIRECT, mode) {
        Err(Errno::INVAL) => Ok(File::from(fs::open(path, flags, mode)?)),
        outcome => Ok(File::from(outcome?)),
    }
}

/// Gives an empty file `len` bytes of the disk, where the file system can.
pub(crate) fn reserve(file: &File, len: u64) -> io::Result<()> {
    match fs::fallocate(file, fs::FallocateFlags::empty(), 0, len) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(len),
        outcome => Ok(outcome?),
    }
}

/// Drops the cached pages of a range. The range is whole pages; the cache may keep them all the same.
pub(crate) fn drop_cached(file: &File, offset: u64, len: u64) {
    if let Some(len) = NonZeroU64::new(len) {
        // The advice is a request: a failure costs memory of the cache and nothing else.
        let _ = fs::fadvise(file, offset, Some(len), fs::Advice::DontNeed);
    }
}

/// Asks for huge pages in `map[start..start + len]`, which begins and ends on huge page borders.
pub(crate) fn advise_huge(map: &MmapMut, start: usize, len: usize) -> io::Result<()> {
    // madvise succeeds even where the setting makes it void.
    let setting = std::fs::read_to_string(HUGE_PAGE_SETTING)
        .map_err(|error| io::Error::other(format!("{HUGE_PAGE_SETTING}: {error}")))?;
    if setting.contains("[never]") {
        return Err(io::Error::other(format!("{HUGE_PAGE_SETTING} says never")));
    }
    map.advise_range(Advice::HugePage, start, len)
}

/// Facts about the block device with this number; `None` when there is no such device, as behind network and memory file systems.
pub(crate) fn block_device(number: u64) -> Option<BlockDevice> {
    let (major, minor) = (fs::major(number), fs::minor(number));
    block_device_at(&Path::new("/sys/dev/block").join(format!("{major}:{minor}")))
}

/// Reads a device's folder in sysfs. A partition lies in the folder of its disk.
fn block_device_at(entry: &Path) -> Option<BlockDevice> {
    let folder = std::fs::canonicalize(entry).ok()?;
    let disk = if folder.join("partition").exists() {
        folder.parent()?.to_path_buf()
    } else {
        folder.clone()
    };
    let name = |folder: &Path| Some(folder.file_name()?.to_string_lossy().into_owned());
    let text = |names: &[&str]| names.iter().find_map(|name| read_word(&disk.join(name)));
    Some(BlockDevice {
        name: name(&folder)?,
        disk: name(&disk)?,
        model: text(&["device/model", "dm/name", "loop/backing_file"]),
        serial: text(&["serial", "device/serial", "wwid", "device/wwid", "dm/uuid"]),
        size_bytes: read_word(&folder.join("size"))
            .and_then(|sectors| sectors.parse::<u64>().ok())
            .and_then(|sectors| sectors.checked_mul(SYSFS_SECTOR_BYTES)),
    })
}

/// The text of a file without the spaces around it; `None` when there is none.
fn read_word(path: &Path) -> Option<String> {
    let text = std::fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&text).trim().to_string();
    (!text.is_empty()).then_some(text)
}

/// The file system that a folder is in.
pub(crate) fn mount_of(folder: &Path) -> Option<Mount> {
    let folder = std::fs::canonicalize(folder).ok()?;
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    mount_in(&table, &folder)
}

/// Finds a folder's mount in a table as proc_pid_mountinfo(5) describes it. Of mounts at one point the last is seen.
fn mount_in(table: &[u8], folder: &Path) -> Option<Mount> {
    let mut best: Option<(usize, Mount)> = None;
    for line in table.split(|&byte| byte == b'\n') {
        let mut fields = line.split(|&byte| byte == b' ');
        let Some(point) = fields.nth(4).map(unescape) else {
            continue;
        };
        let point = PathBuf::from(std::ffi::OsString::from_vec(point));
        let depth = point.components().count();
        if !folder.starts_with(&point) || best.as_ref().is_some_and(|(deepest, _)| *deepest > depth) {
            continue;
        }
        // Optional fields end with a dash.
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        if let (Some(kind), Some(source)) = (rest.next(), rest.next()) {
            let text = |field| String::from_utf8_lossy(&unescape(field)).into_owned();
            let mount = Mount {
                file_system: text(kind),
                source: text(source),
            };
            best = Some((depth, mount));
        }
    }
    best.map(|(_, mount)| mount)
}

/// Undoes the octal escapes of spaces, tabs, line ends and backslashes.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| byte == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(code.unwrap_or(byte));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 21 0:25 / /mnt rw - tmpfs tmpfs rw
31 30 259:3 / /mnt/fast\\040disk rw,noatime master:2 shared:9 - xfs /dev/nvme0n1p3 rw
32 30 0:40 / /mnt/net rw - nfs4 server:/export rw
33 30 0:41 / /mnt/net rw - fuse.sshfs me@there: rw
broken line
";

    fn found(folder: &str) -> (String, String) {
        let mount = mount_in(TABLE, Path::new(folder)).unwrap();
        (mount.file_system, mount.source)
    }

    #[test]
    fn the_deepest_and_last_mount_is_the_folder_s() {
        assert_eq!(found("/home/me"), ("ext4".into(), "/dev/root".into()));
        assert_eq!(found("/mnt/fast disk/k3"), ("xfs".into(), "/dev/nvme0n1p3".into()));
        assert_eq!(found("/mnt/faster"), ("tmpfs".into(), "tmpfs".into()));
        assert_eq!(found("/mnt/net"), ("fuse.sshfs".into(), "me@there:".into()));
        assert_eq!(mount_in(b"", Path::new("/")), None);
    }

    #[test]
    fn this_folder_is_in_some_file_system() {
        assert!(mount_of(Path::new(".")).is_some_and(|mount| !mount.file_system.is_empty()));
        assert_eq!(mount_of(Path::new("/no/such/folder")), None);
    }

    #[test]
    fn a_partition_has_its_disk_s_model() {
        let sys = tempfile::tempdir().unwrap();
        let disk = sys.path().join("devices/nvme0n1");
        let write = |path: &str, text: &str| {
            let path = disk.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("device/model", "FAST 9100 PRO 4TB      \n");
        write("device/serial", "S1\n");
        write("size", "2000\n");
        write("nvme0n1p3/partition", "3\n");
        write("nvme0n1p3/size", "1000\n");
        let entry = sys.path().join("259:3");
        std::os::unix::fs::symlink(disk.join("nvme0n1p3"), &entry).unwrap();
        let expected = BlockDevice {
            name: "nvme0n1p3".into(),
            disk: "nvme0n1".into(),
            model: Some("FAST 9100 PRO 4TB".into()),
            serial: Some("S1".into()),
            size_bytes: Some(512_000),
        };
        assert_eq!(block_device_at(&entry), Some(expected));
        assert_eq!(block_device_at(&sys.path().join("1:1")), None);
    }
}
