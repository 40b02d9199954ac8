//! Comparing experts with the checksums of packs before they are used.

use super::PlacementError;
use drives::{AlignedBuf, DirectFile, ExpertId, Home, Layout, Notice, Notices, PackError, PackIndex, SlotLease};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// The checksums of all packs of a layout. They hold for the bytes from any home.
pub(crate) struct Checksums {
    layout: Arc<Layout>,
    notices: Notices,
    packs: Vec<PackIndex>,
    /// For each expert the packs whose checksums cover bytes that those of earlier packs do not.
    of: HashMap<ExpertId, Vec<u32>>,
}

impl Checksums {
    pub(crate) fn new(layout: Arc<Layout>, packs: Vec<PackIndex>, notices: &Notices) -> Self {
        let mut of: HashMap<ExpertId, Vec<u32>> = HashMap::new();
        let mut covered: HashMap<(ExpertId, u32), Vec<Range<u64>>> = HashMap::new();
        for (number, pack) in packs.iter().enumerate() {
            for range in pack.contents().ranges() {
                let known = covered.entry((range.expert, range.extent)).or_default();
                let (start, end) = (range.start, range.start + range.len);
                if !known.iter().any(|known| known.start <= start && end <= known.end) {
                    known.push(start..end);
                    let packs = of.entry(range.expert).or_default();
                    if packs.last() != Some(&(number as u32)) {
                        packs.push(number as u32);
                    }
                }
            }
        }
        Self {
            layout,
            notices: notices.clone(),
            packs,
            of,
        }
    }

    /// Compares an expert with its checksums. Returns `None` when its bytes are right, or when nothing is known about them; and otherwise its
    /// extents as they should be, where wrong bytes were read again from a home that has them right.
    ///
    /// # Errors
    ///
    /// [`PlacementError::AllDamaged`] when no home has them right.
    pub(crate) fn check(
        &self,
        expert: ExpertId,
        lease: &SlotLease,
        compared: &mut u64,
    ) -> Result<Option<Vec<Vec<u8>>>, PlacementError> {
        let Some(packs) = self.of.get(&expert) else {
            return Ok(None);
        };
        let mut repaired: Option<Vec<Vec<u8>>> = None;
        for pack in packs.iter().map(|&pack| &self.packs[pack as usize]) {
            for extent in 0..lease.extents() {
                loop {
                    let bytes = repaired
                        .as_ref()
                        .map_or(lease.extent(extent), |extents| &extents[extent]);
                    let (start, len) = match pack.check(expert, extent as u32, 0, bytes) {
                        Ok(bytes) => {
                            *compared += bytes;
                            break;
                        }
                        Err(PackError::Damaged { start, len, .. }) => (start, len),
                        Err(error) => return Err(error.into()),
                    };
                    let chunk = self.read_again(pack, expert, extent, start..start + len)?;
                    let copy = || {
                        (0..lease.extents())
                            .map(|extent| lease.extent(extent).to_vec())
                            .collect()
                    };
                    let extents = repaired.get_or_insert_with(copy);
                    extents[extent][start as usize..][..len as usize].copy_from_slice(&chunk);
                }
            }
        }
        Ok(repaired)
    }

    /// The bytes of a chunk from the first home that has them right.
    fn read_again(
        &self,
        pack: &PackIndex,
        expert: ExpertId,
        extent: usize,
        chunk: Range<u64>,
    ) -> Result<Vec<u8>, PlacementError> {
        let homes = self.layout.homes(expert, extent).unwrap_or_default();
        let whole = |home: &&Home| home.start <= chunk.start && chunk.end <= home.start + home.len;
        let mut wrong: Vec<PathBuf> = Vec::new();
        let mut damage = "no home holds them whole".to_owned();
        for home in homes.iter().filter(whole) {
            let path = &self.layout.files()[home.file.index()].path;
            let offset = home.offset + (chunk.start - home.start);
            let read = DirectFile::open(path, &self.notices)
                .and_then(|file| AlignedBuf::read_range(&file, offset, (chunk.end - chunk.start) as usize, 1))
                .map_err(PackError::Read)
                .and_then(|buffer| {
                    pack.check(expert, extent as u32, chunk.start, buffer.bytes())?;
                    Ok(buffer.bytes().to_vec())
                });
            match read {
                Ok(bytes) => {
                    self.notices.add(Notice::Corrupt {
                        expert,
                        times: 1,
                        files: wrong,
                    });
                    return Ok(bytes);
                }
                Err(error) => {
                    damage = error.to_string();
                    wrong.push(path.clone());
                }
            }
        }
        Err(PlacementError::AllDamaged {
            expert,
            homes: wrong.len(),
            damage,
        })
    }
}
