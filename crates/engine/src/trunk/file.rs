//! A converted trunk in its folder: found or made, read with its checksums, mended where it is damaged.

use super::convert::{Conversion, Pages};
use super::format::{Contents, Entry};
use super::{LoadPhase, LoadProgress, TRUNK_SUFFIX, TrunkError, TrunkFormat};
use crate::error::Error;
use crate::generate::Cancel;
use crate::memory::human;
use crate::session::Identity;
use checkpoint::Checkpoint;
use drives::{AlignedBuf, DEFAULT_DEPTH, DirectFile, Notice, Notices, PackError, PartialFile};
use kernels::{NUMERICS_VERSION, SharedBytes};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Between two looks whether another process has ended.
const PAUSE: Duration = Duration::from_millis(200);

/// What is needed to find a trunk file or make one.
pub(crate) struct Making<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) threads: usize,
    pub(crate) notices: &'a Notices,
    pub(crate) cancel: &'a Cancel,
}

/// A file whose header and index are those of this model.
pub(crate) struct TrunkFile {
    path: PathBuf,
    file: DirectFile,
    entries: Vec<Entry>,
    places: HashMap<String, usize>,
}

impl Making<'_> {
    /// The trunk of this model, whose identity is `identity`, in `folder`, which is made where there is none.
    pub(crate) fn find_or_make(
        &self,
        folder: &Path,
        identity: Identity,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<TrunkFile, Error> {
        let name = format!("{identity}-{}-n{NUMERICS_VERSION}{TRUNK_SUFFIX}", TrunkFormat::Int8);
        let path = folder.join(name);
        if let Some(file) = self.open(&path, identity, true)? {
            return Ok(file);
        }
        std::fs::create_dir_all(folder).map_err(|error| TrunkError::io(folder, "create", &error))?;
        let model = self.checkpoint.dir();
        let model = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
        let model = model.as_os_str().as_encoded_bytes();
        let mut contents = Contents::new(self.checkpoint.schema(), identity, model.to_vec());
        // What is left of it does not matter, and room may be.
        let _ = PartialFile::sweep(folder, TRUNK_SUFFIX);
        let partial = loop {
            self.cancel.check()?;
            match PartialFile::create(&path, contents.file_len) {
                Err(PackError::Busy { .. }) => {
                    progress(LoadProgress {
                        phase: LoadPhase::Wait,
                        done: 0,
                        of: 1,
                    });
                    std::thread::sleep(PAUSE);
                }
                created => break created.map_err(TrunkError::from_writing)?,
            }
            if let Some(file) = self.open(&path, identity, false)? {
                return Ok(file);
            }
        };
        // Whoever had the lock before may have made it.
        if let Some(file) = self.open(&path, identity, false)? {
            return Ok(file);
        }
        let len = contents.file_len;
        self.write(
            &mut contents,
            &mut |pages, offset| partial.write_pages(pages, offset),
            &|error| TrunkError::from_writing(partial.write_error(error, len)),
            progress,
        )?;
        partial.sync().map_err(TrunkError::from_writing)?;
        partial.complete().map_err(TrunkError::from_writing)?;
        self.note(&path, format!("the trunk was converted to int8 once, {}", human(len)));
        self.remove_stale(folder, &path, &contents);
        match self.open(&path, identity, true)? {
            Some(file) => Ok(file),
            None => Err(TrunkError::io(&path, "read back", &std::io::ErrorKind::InvalidData.into()).into()),
        }
    }

    /// Converts into pages, data first, header and index last.
    fn write(
        &self,
        contents: &mut Contents,
        write: &mut dyn FnMut(&[u8], u64) -> std::io::Result<()>,
        failed: &dyn Fn(&std::io::Error) -> Error,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<(), Error> {
        let entries = &contents.entries;
        let of = Conversion::published_bytes(entries);
        let mut report = |done| {
            progress(LoadProgress {
                phase: LoadPhase::Convert,
                done,
                of,
            });
        };
        report(0);
        let mut pages = Pages::new(contents.data_offset, write)?;
        let crcs = self.conversion().run(entries, &mut report, &mut |place, bytes| {
            let added = pages.add_at(entries[place].offset, bytes);
            added.map_err(|error| failed(&error))
        })?;
        pages.flush().map_err(|error| failed(&error))?;
        for (entry, crc) in contents.entries.iter_mut().zip(crcs) {
            entry.crc = crc;
        }
        let mut head = Pages::new(0, write)?;
        let written = head.add_at(0, &contents.encode()).and_then(|()| head.flush());
        written.map_err(|error| failed(&error))
    }

    fn conversion(&self) -> Conversion<'_> {
        Conversion {
            checkpoint: self.checkpoint,
            notices: self.notices,
            threads: self.threads,
            cancel: self.cancel,
        }
    }

    /// The file, if it is there and of use. A notice says why it is not, if `say`.
    fn open(&self, path: &Path, identity: Identity, say: bool) -> Result<Option<TrunkFile>, Error> {
        match path.try_exists() {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) => return Err(TrunkError::io(path, "open", &error).into()),
        }
        let checked = Contents::read(path, self.notices).and_then(|(file, contents)| {
            if let Some((found, expected)) = contents.identity.difference(&identity) {
                return Err(format!("found {found}, expected {expected}"));
            }
            contents.check_places(self.checkpoint.schema())?;
            Ok((file, contents))
        });
        match checked {
            Ok((file, Contents { entries, .. })) => {
                let places = entries.iter().enumerate();
                Ok(Some(TrunkFile {
                    path: path.to_path_buf(),
                    places: places.map(|(place, entry)| (entry.name.clone(), place)).collect(),
                    file,
                    entries,
                }))
            }
            Err(problem) => {
                if say {
                    self.note(path, format!("{problem}, so the trunk is converted again"));
                }
                Ok(None)
            }
        }
    }

    /// Removes trunks that were made of what the model's folder held before.
    fn remove_stale(&self, folder: &Path, path: &Path, contents: &Contents) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let other = entry.path();
            if other == path || !entry.file_name().to_string_lossy().ends_with(TRUNK_SUFFIX) {
                continue;
            }
            let Ok((_, found)) = Contents::read(&other, self.notices) else {
                continue;
            };
            if found.folder == contents.folder && std::fs::remove_file(&other).is_ok() {
                let dir = self.checkpoint.dir().display();
                self.note(
                    &other,
                    format!("removed, since it was made of another model that {dir} held before, and the trunk was converted again"),
                );
            }
        }
    }

    fn note(&self, path: &Path, what: String) {
        self.notices.add(Notice::KeptFile {
            path: path.to_path_buf(),
            what,
        });
    }
}

impl TrunkFile {
    /// Bytes in memory of all tensors of this file.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes() as u64).sum()
    }

    /// Published bytes of the tensors that it stands for.
    pub(crate) fn published_bytes(&self) -> u64 {
        Conversion::published_bytes(&self.entries)
    }

    /// The int8 form of a tensor, `[rows, cols]`, compared with its checksum; `None` for one that stays as published. Damaged bytes
    /// are made again from the model, here and in the file.
    pub(crate) fn tensor(&self, name: &str, making: &Making<'_>) -> Result<Option<([usize; 2], SharedBytes)>, Error> {
        let Some(&place) = self.places.get(name) else {
            return Ok(None);
        };
        let entry = &self.entries[place];
        let shape = [entry.rows, entry.cols];
        let read = AlignedBuf::read_range(&self.file, entry.offset, entry.bytes(), DEFAULT_DEPTH)?;
        let found = crc32c::crc32c(read.bytes());
        if found == entry.crc {
            return Ok(Some((shape, Arc::new(Kept(read)))));
        }
        drop(read);
        Ok(Some((shape, Arc::new(self.mend(entry, found, making)?))))
    }

    fn mend(&self, entry: &Entry, found: u32, making: &Making<'_>) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::with_capacity(entry.bytes());
        let crcs = making
            .conversion()
            .run(std::slice::from_ref(entry), &mut |_| (), &mut |_, part| {
                bytes.extend_from_slice(part);
                Ok(())
            })?;
        if crcs != [entry.crc] {
            return Err(TrunkError::Changed {
                path: self.path.clone(),
                tensor: entry.name.clone(),
                found,
                expected: entry.crc,
                converted: crcs[0],
            }
            .into());
        }
        // Another process that reads meanwhile finds these bytes or damaged ones, and knows by the checksum.
        let mended = File::options().write(true).open(&self.path).and_then(|file| {
            file.write_all_at(&bytes, entry.offset)?;
            file.sync_data()
        });
        let then = match mended {
            Ok(()) => "mended from the model's weights".to_owned(),
            Err(error) => format!(
                "replaced by the model's weights in memory; the file could not be mended ({error}), so delete it"
            ),
        };
        making.note(
            &self.path,
            format!(
                "tensor {}: found checksum {found:08x}, expected {:08x}; {then}",
                entry.name, entry.crc
            ),
        );
        Ok(bytes)
    }
}

/// Keeps a buffer's memory for as long as the weights are in use.
pub(crate) struct Kept(pub(crate) AlignedBuf);

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn a_disk_that_fills_up_leaves_nothing_and_says_both_numbers() {
        let (model, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        checkpoint::tiny::write_tiny(model.path()).unwrap();
        let checkpoint = Checkpoint::open(model.path()).unwrap();
        let making = Making {
            checkpoint: &checkpoint,
            threads: 2,
            notices: &Notices::default(),
            cancel: &Cancel::default(),
        };
        let identity = Identity::read(&checkpoint).unwrap();
        let path = folder.path().join("a.trunk");
        let mut contents = Contents::new(checkpoint.schema(), identity, b"here".to_vec());
        let (len, data) = (contents.file_len, contents.file_len - contents.data_offset);
        // Room for nothing, and for all but the head; the tiny model's data is one write.
        for room in [0, data] {
            let partial = PartialFile::create(&path, len).unwrap();
            let mut left = room;
            let mut write = |pages: &[u8], offset: u64| {
                left = left.checked_sub(pages.len() as u64).ok_or(ErrorKind::StorageFull)?;
                partial.write_pages(pages, offset)
            };
            let failed = |error: &std::io::Error| TrunkError::from_writing(partial.write_error(error, len));
            let error = making
                .write(&mut contents, &mut write, &failed, &mut |_| ())
                .unwrap_err();
            let Error::Trunk(TrunkError::NoSpace { needed, free, .. }) = &error else {
                panic!("{error}");
            };
            assert!(*needed == len && *free > 0);
            assert!(error.to_string().contains("--trunk-folder"), "{error}");
            drop(partial);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }
}
