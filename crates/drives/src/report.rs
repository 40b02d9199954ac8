//! What people want to know about their drives.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::device::{self, Device};
use crate::error::Result;
use crate::layout::{ExpertId, Layout, LayoutBuilder, Source};
use crate::notice::Notices;
use crate::page::PAGE_BYTES;
use crate::profile::{CHUNK_SIZES, DriveSpeed, Profile};

/// Files of a drive that are measured with: the largest ones.
const MOST_FILES: usize = 16;

/// Entries of folders that are looked at in the search for them, and how deep. A checkpoint lies at the top or little below it.
const MOST_ENTRIES: usize = 20_000;
const DEEPEST: usize = 3;

/// Unit of the space that a file takes, as stat(2) tells it.
const BLOCK_BYTES: u64 = 512;

/// Most bytes of a file that are measured with. An expert, which the file stands for here, is no larger.
const MOST_BYTES: u64 = (u32::MAX as u64) - PAGE_BYTES as u64;

/// One drive, described.
#[derive(Debug, Clone, Serialize)]
pub struct DriveReport {
    /// Its folders, as they were named.
    pub folders: Vec<PathBuf>,
    /// The device.
    pub device: Device,
    /// Name of the file system, such as "ext4"; `None` where the system does not tell.
    pub file_system: Option<String>,
    /// Bytes that may still be written; `None` where the system does not tell.
    pub free_bytes: Option<u64>,
    /// Whether reads go past the page cache; `None` when there was no file to try.
    pub direct: Option<bool>,
    /// Rates alone and together, best chunk and depth; `None` when it could not be measured.
    pub speed: Option<DriveSpeed>,
    /// Places in the list of the drives that share a bottleneck with this one.
    pub shares_with: Vec<usize>,
    /// Why it could not be measured, in words.
    pub problem: Option<String>,
}

/// Describes the drives that some folders are on, in the order of the folders; folders on one device are one drive. Measures
/// them with the largest files found there, read-only, in about [`MEASURE_BUDGET`](crate::MEASURE_BUDGET). A drive without a file of at least
/// 512 KiB says so as its [`problem`](DriveReport::problem).
///
/// # Errors
///
/// As [`Profile::measure`]; [`Error::Open`](crate::Error::Open) also names a path that does not exist.
pub fn describe(paths: &[PathBuf], notices: &Notices) -> Result<Vec<DriveReport>> {
    let mut reports: Vec<DriveReport> = Vec::new();
    for path in paths {
        let device = Device::of(path)?;
        match reports.iter_mut().find(|report| report.device.number == device.number) {
            Some(report) if report.folders.contains(path) => {}
            Some(report) => report.folders.push(path.clone()),
            None => reports.push(unmeasured(device, path)),
        }
    }
    let mut builder = LayoutBuilder::new();
    let mut direct = Vec::new();
    for (place, report) in reports.iter().enumerate() {
        let files = largest_files(&report.folders, report.device.number);
        direct.push(files.first().map(|(_, path)| device::takes_direct_reads(path)));
        for (expert, (len, path)) in files.into_iter().enumerate() {
            let source = Source {
                file: builder.file(&path)?,
                offset: 0,
                len: len.min(MOST_BYTES),
            };
            let id = ExpertId {
                layer: place as u32,
                expert: expert as u32,
            };
            builder.expert(id, &[source])?;
        }
    }
    for (report, direct) in reports.iter_mut().zip(direct) {
        match direct {
            Some(Ok(direct)) => report.direct = Some(direct),
            Some(Err(error)) => report.problem = Some(error.to_string()),
            None => {
                let least = CHUNK_SIZES[0] >> 10;
                report.problem = Some(format!("no file of {least} KiB or more to measure with"));
            }
        }
    }
    if builder.is_empty() {
        return Ok(reports);
    }
    let layout = Arc::new(builder.build()?);
    let profile = Profile::measure(&layout, notices)?;
    add_speeds(&mut reports, &layout, &profile);
    Ok(reports)
}

/// Describes the drives of a layout from its profile, in the layout's order.
///
/// # Errors
///
/// [`Error::Open`](crate::Error::Open) when a folder or file cannot be examined.
pub fn report(layout: &Layout, profile: &Profile) -> Result<Vec<DriveReport>> {
    let mut reports = Vec::new();
    for (drive, id) in layout.drives().iter().zip(layout.drive_ids()) {
        let first = drive.folders.first().map_or(Path::new("/"), PathBuf::as_path);
        let mut report = unmeasured(Device::of(first)?, first);
        report.folders.clone_from(&drive.folders);
        let file = layout.files().iter().find(|file| file.drive == id && file.len > 0);
        report.direct = file.map(|file| device::takes_direct_reads(&file.path)).transpose()?;
        reports.push(report);
    }
    add_speeds(&mut reports, layout, profile);
    Ok(reports)
}

fn unmeasured(device: Device, folder: &Path) -> DriveReport {
    DriveReport {
        folders: vec![folder.to_path_buf()],
        device,
        file_system: device::file_system(folder),
        free_bytes: device::free_bytes(folder),
        direct: None,
        speed: None,
        shares_with: Vec::new(),
        problem: None,
    }
}

/// Fills in what a profile of a layout says. The reports may name more drives, in another order.
fn add_speeds(reports: &mut [DriveReport], layout: &Layout, profile: &Profile) {
    let numbers: Vec<u64> = reports.iter().map(|report| report.device.number).collect();
    let place_of = |drive: usize| {
        let number = layout.drives().get(drive)?.device?;
        numbers.iter().position(|&other| other == number)
    };
    for (drive, measured) in profile.drives.iter().enumerate() {
        let Some(place) = place_of(drive) else { continue };
        let report = &mut reports[place];
        report.speed.clone_from(&measured.speed);
        report.problem = measured.problem.clone().or(report.problem.take());
        report.shares_with = profile.shares_with(drive).into_iter().filter_map(place_of).collect();
        report.shares_with.sort_unstable();
    }
}

/// The largest files of at least the smallest chunk below some folders on one device, largest first.
fn largest_files(folders: &[PathBuf], device: u64) -> Vec<(u64, PathBuf)> {
    use std::os::unix::fs::MetadataExt;
    let mut files: Vec<(u64, PathBuf)> = Vec::new();
    let mut open: Vec<(PathBuf, usize)> = folders.iter().map(|folder| (folder.clone(), 0)).collect();
    let mut seen = 0;
    while let Some((folder, depth)) = open.pop() {
        // What may not be read is not measured with.
        let Ok(entries) = std::fs::read_dir(&folder) else {
            continue;
        };
        for entry in entries.flatten() {
            seen += 1;
            if seen > MOST_ENTRIES {
                break;
            }
            let path = entry.path();
            // Folders are entered only by their own name, files also through links, as model hubs keep them.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth < DEEPEST {
                    open.push((path, depth + 1));
                }
                continue;
            }
            let Ok(found) = std::fs::metadata(&path) else { continue };
            // Reading holes says nothing about a drive.
            let dense = found.blocks() * BLOCK_BYTES > found.len() / 2;
            if found.is_file() && dense && found.dev() == device && found.len() >= CHUNK_SIZES[0] as u64 {
                files.push((found.len(), path));
            }
        }
    }
    files.sort_by(|a, b| b.cmp(a));
    files.retain(|(_, path)| std::fs::File::open(path).is_ok());
    files.truncate(MOST_FILES);
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_files_are_found_through_folders_and_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/b/c/d")).unwrap();
        let least = CHUNK_SIZES[0] as u64;
        for (name, len) in [
            ("small", least - 1),
            ("first", least),
            ("a/b/second", least + 7),
            ("a/b/c/d/deep", 9 * least),
        ] {
            std::fs::write(at(name), vec![1; len as usize]).unwrap();
        }
        std::fs::File::create(at("hole")).unwrap().set_len(100 * least).unwrap();
        std::os::unix::fs::symlink(at("first"), at("a/link")).unwrap();
        std::os::unix::fs::symlink(folder.path(), at("a/loop")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", at("a/zero")).unwrap();
        let device = Device::of(folder.path()).unwrap().number;
        let found = largest_files(&[folder.path().to_path_buf()], device);
        let expected = [
            (least + 7, at("a/b/second")),
            (least, at("first")),
            (least, at("a/link")),
        ];
        assert_eq!(found, expected);
        assert!(largest_files(&[folder.path().to_path_buf()], device + 1).is_empty());
    }
}
