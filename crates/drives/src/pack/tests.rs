use super::*;
use crate::notice::Notices;
use proptest::prelude::*;
use std::ops::ControlFlow;

/// Bytes without a pattern.
pub(super) fn noise(len: usize) -> Vec<u8> {
    let mut state = 7u64;
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(byte).collect()
}

const CHUNK: u32 = 8192;

fn id(expert: u32) -> ExpertId {
    ExpertId { layer: 2, expert }
}

fn range(expert: u32, extent_offset: u64, extent_len: u64, start: u64, len: u64) -> PackRange {
    PackRange {
        expert: id(expert),
        extent: 0,
        shard: 0,
        extent_offset,
        extent_len,
        start,
        len,
        offset: 0,
    }
}

fn shard_of(path: &Path) -> PackShard {
    PackShard {
        name: path.file_name().unwrap().to_string_lossy().into_owned(),
        identity: FileIdentity::read(path, 100).unwrap(),
    }
}

/// A whole expert and the second part of another, of a shard of 200,000 bytes.
pub(super) fn small_contents(shard: &Path) -> PackContents {
    let border = 5 * 4096 - 50_100 % 4096;
    let ranges = vec![
        range(1, 50_100, 70_000, border, 70_000 - border),
        range(0, 100, 50_000, 0, 50_000),
    ];
    PackContents::new(CHUNK, vec![shard_of(shard)], ranges).unwrap()
}

struct Case {
    folder: tempfile::TempDir,
    shard: PathBuf,
    bytes: Vec<u8>,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (shard, bytes) = (folder.path().join("shard"), noise(200_000));
        std::fs::write(&shard, &bytes).unwrap();
        Self { folder, shard, bytes }
    }

    fn pack(&self) -> PathBuf {
        self.folder.path().join("a.pack")
    }

    fn write(&self, contents: &PackContents) -> Result<PackIndex, PackError> {
        let mut go_on = |_| ControlFlow::Continue(());
        write_pack(
            &self.pack(),
            contents,
            std::slice::from_ref(&self.shard),
            &Notices::default(),
            &mut go_on,
        )
    }

    fn open(&self) -> Result<PackIndex, PackError> {
        PackIndex::open(&self.pack(), &Notices::default())
    }

    fn verify(&self) -> PackReport {
        verify_pack(&self.pack(), &Notices::default(), &mut |_| ControlFlow::Continue(())).unwrap()
    }
}

#[test]
fn a_pack_holds_the_published_bytes_at_their_page_offsets() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    let written = case.write(&contents).unwrap();
    assert_eq!(written, case.open().unwrap());
    assert_eq!(written.contents(), &contents);
    let file = std::fs::read(case.pack()).unwrap();
    assert_eq!(file.len() as u64, contents.file_len());
    assert!(file.len().is_multiple_of(PAGE_BYTES));
    let mut covered = vec![false; file.len()];
    for range in contents.ranges() {
        let from = (range.extent_offset + range.start) as usize;
        let (offset, len) = (range.offset as usize, range.len as usize);
        assert_eq!(offset % PAGE_BYTES, from % PAGE_BYTES);
        assert!(file[offset..][..len] == case.bytes[from..][..len]);
        covered[offset..][..len].fill(true);
    }
    let data = contents.data_offset as usize;
    let outside = file.iter().zip(covered).skip(data).filter(|(_, covered)| !covered);
    assert!(outside.clone().count() > 0 && outside.clone().all(|(&byte, _)| byte == 0));
    let report = case.verify();
    assert_eq!((report.ranges, report.bytes), (2, contents.expert_bytes()));
    assert_eq!(report.chunks, contents.chunk_total());
    assert!(report.bad.is_empty());
}

/// The numbers of the picture in `docs/layout.md`.
#[test]
fn the_header_is_as_documented() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    case.write(&contents).unwrap();
    let file = std::fs::read(case.pack()).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(file[at..][..4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(file[at..][..8].try_into().unwrap());
    assert_eq!(&file[..8], b"ANABRPAK");
    assert_eq!((u32_at(8), u32_at(12)), (1, CHUNK));
    assert_eq!((u64_at(16), u64_at(24)), (file.len() as u64, contents.data_offset));
    let index_bytes = u64_at(32) as usize;
    let checksums = contents.chunk_total();
    assert_eq!(index_bytes, 18 + "shard".len() + 2 * 56 + 4 * checksums);
    assert_eq!((u32_at(40), u32_at(44), u64_at(48)), (1, 2, checksums as u64));
    assert_eq!(u32_at(56), crc32c::crc32c(&file[4096..][..index_bytes]));
    assert_eq!(u32_at(60), crc32c::crc32c(&file[..60]));
    assert!(file[64..4096].iter().all(|&byte| byte == 0));
    // The first range: layer 2, expert 0, extent 0, shard 0, then where it is.
    let at = 4096 + 18 + 5;
    assert_eq!([0, 4, 8, 12].map(|field| u32_at(at + field)), [2, 0, 0, 0]);
    let offset = contents.data_offset + 100;
    assert_eq!(
        [16, 24, 32, 40, 48].map(|field| u64_at(at + field)),
        [100, 50_000, 0, 50_000, offset]
    );
    // The first checksum: from the extent's start to the end of its second page.
    assert_eq!(u32_at(at + 2 * 56), crc32c::crc32c(&case.bytes[100..8192]));
    // RFC 3720 B.4: 32 bytes of zeros.
    assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
}

#[test]
fn every_damaged_byte_of_the_head_is_refused() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    case.write(&contents).unwrap();
    let good = std::fs::read(case.pack()).unwrap();
    let index_end = 4096 + format::index_bytes(&contents.shards, 2, contents.chunk_total()) as usize;
    for place in (0..64).chain(4096..index_end) {
        let mut bad = good.clone();
        bad[place] ^= 0x10;
        std::fs::write(case.pack(), bad).unwrap();
        let error = case.open().expect_err("damage").to_string();
        assert!(error.contains("a.pack: found"), "byte {place}: {error}");
    }
    for len in [0, 63, 4095, 4096, good.len() - 4096, good.len() - 1] {
        std::fs::write(case.pack(), &good[..len]).unwrap();
        let error = case.open().expect_err("cut").to_string();
        assert!(error.contains("a.pack: found"), "{len} bytes: {error}");
    }
    std::fs::write(case.pack(), [&good[..], &[0; 4096]].concat()).unwrap();
    let error = case.open().unwrap_err().to_string();
    let (found, expected) = (good.len() + 4096, good.len());
    assert!(
        error.contains(&format!("found {found} bytes, expected {expected}")),
        "{error}"
    );
    std::fs::write(case.pack(), &good).unwrap();
    case.open().unwrap();
}

/// An index that is wrong and yet has the right checksum, as a faulty writer would make it.
#[test]
fn a_contradictory_index_is_refused() {
    let case = Case::new();
    let good = small_contents(&case.shard);
    let index = case.write(&good).unwrap();
    let data = std::fs::read(case.pack()).unwrap();
    type Spoil = fn(&mut PackContents);
    let spoils: [(Spoil, &str); 9] = [
        (|c| c.ranges[0].offset += 1, "shifted in its page"),
        (|c| c.ranges[1].offset += 1 << 20, "outside the data"),
        (|c| c.ranges[1].offset %= 4096, "outside the data"),
        (|c| c.ranges[0].shard = 1, "shard 1, expected one of 1"),
        (|c| c.ranges[0].len = 0, "expected at least 1 inside"),
        (|c| c.ranges[1].extent_len -= 1, "expected at least 1 inside"),
        (|c| c.ranges[0].len -= 1, "expected borders on pages"),
        (|c| c.ranges[0].expert = id(3), "expected ascending order"),
        (|c| c.shards[0].name = "../up".into(), "expected a file name"),
    ];
    for (spoil, expected) in spoils {
        let mut contents = good.clone();
        spoil(&mut contents);
        let head = format::encode(&contents, &index.checksums);
        std::fs::write(case.pack(), [&head[..], &data[head.len()..]].concat()).unwrap();
        let error = case.open().expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    for checksums in [&index.checksums[1..], &[&index.checksums[..], &[0]].concat()] {
        let head = format::encode(&good, checksums);
        std::fs::write(case.pack(), [&head[..], &data[head.len()..]].concat()).unwrap();
        let error = case.open().unwrap_err().to_string();
        assert!(error.contains("checksums for"), "{error}");
    }
}

#[test]
fn other_files_and_versions_say_what_to_do() {
    let case = Case::new();
    std::fs::write(case.pack(), noise(5000)).unwrap();
    let error = case.open().unwrap_err().to_string();
    assert!(
        error.contains("expected a pack, which begins with \"ANABRPAK\""),
        "{error}"
    );
    case.write(&small_contents(&case.shard)).unwrap();
    let mut file = std::fs::read(case.pack()).unwrap();
    file[8] = 2;
    std::fs::write(case.pack(), file).unwrap();
    let error = case.open().unwrap_err().to_string();
    assert!(
        error.contains("found pack version 2, expected 1; use the program"),
        "{error}"
    );
}

#[test]
fn contents_that_make_no_pack_are_refused() {
    let case = Case::new();
    let shards = || vec![shard_of(&case.shard)];
    let problem = |ranges: Vec<PackRange>| {
        let error = PackContents::new(CHUNK, shards(), ranges).unwrap_err();
        error.to_string()
    };
    assert!(problem(vec![]).contains("no range"));
    let whole = range(0, 4096, 20_000, 0, 20_000);
    let part = range(0, 4096, 20_000, 4096, 4096);
    assert!(problem(vec![whole, part]).contains("bytes 4096..8192 are there twice"));
    assert!(problem(vec![range(0, 4096, 20_000, 5, 100)]).contains("borders on pages"));
    assert!(problem(vec![range(0, 4096, 20_000, 16_384, 4096)]).contains("inside an extent of 20000"));
    assert!(problem(vec![range(0, u64::MAX - 5, 10, 0, 10)]).contains("inside an extent"));
    assert!(problem(vec![range(0, 0, 1 << 40, 0, 1 << 40)]).contains("inside an extent"));
    let moved = range(0, 8192, 20_000, 8192, 4096);
    assert!(problem(vec![part, moved]).contains("place it differently"));
    for chunk in [0, 4095, 16 << 20] {
        let error = PackContents::new(chunk, shards(), vec![whole]).unwrap_err();
        assert!(error.to_string().contains("expected a positive multiple of 4096"));
    }
    // 4 GiB in chunks of a page, two hundred times, are too many checksums.
    let many = (0..200).map(|expert| range(expert, 0, u32::MAX.into(), 0, u32::MAX.into()));
    let error = PackContents::new(4096, shards(), many.collect())
        .unwrap_err()
        .to_string();
    assert!(error.contains("expected at most 268435456"), "{error}");
}

#[test]
fn damage_is_found_where_it_is() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    let index = case.write(&contents).unwrap();
    let mut file = std::fs::read(case.pack()).unwrap();
    let (first, second) = (contents.ranges()[0], contents.ranges()[1]);
    // The last byte of the first range, and a byte in the middle of the second.
    file[(first.offset + first.len - 1) as usize] ^= 1;
    file[second.offset as usize + 30_000] ^= 0x80;
    // Padding is not the publisher's and is not looked at.
    file[first.offset as usize - 1] ^= 1;
    std::fs::write(case.pack(), &file).unwrap();
    let report = case.verify();
    assert_eq!(report.bad.len(), 2);
    let (one, two) = (&report.bad[0], &report.bad[1]);
    assert_eq!((one.expert, one.extent), (id(0), 0));
    assert_eq!(one.start + one.len, 50_000);
    assert_eq!(one.offset, first.offset + one.start);
    assert_eq!(two.expert, id(1));
    assert!((two.offset..two.offset + two.len).contains(&(second.offset + 30_000)));
    assert!(two.reason.contains("expected"), "{}", two.reason);

    // The index alone finds it too, in bytes from anywhere.
    let published = &case.bytes[100..50_100];
    assert_eq!(index.check(id(0), 0, 0, published).unwrap(), 50_000);
    let mut wrong = published.to_vec();
    wrong[9000] ^= 4;
    let error = index.check(id(0), 0, 0, &wrong).unwrap_err();
    let PackError::Damaged { start, len, .. } = error else {
        panic!("{error}");
    };
    assert!((start..start + len).contains(&9000));
    // Chunks that lie inside, and no others.
    assert_eq!(
        index.check(id(0), 0, 8092, &published[8092..8092 + 8192]).unwrap(),
        8192
    );
    assert_eq!(index.check(id(0), 0, 8093, &published[8093..8093 + 8191]).unwrap(), 0);
    assert_eq!(index.check(id(7), 0, 0, published).unwrap(), 0);
    assert_eq!(index.check(id(0), 1, 0, published).unwrap(), 0);
    // A part that this pack does not hold is not compared.
    let other = &case.bytes[50_100..120_100];
    assert_eq!(index.check(id(1), 0, 0, other).unwrap(), second.len);
}

#[test]
fn a_pack_that_was_cut_after_opening_lists_what_is_gone() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    let index = case.write(&contents).unwrap();
    let file = std::fs::File::options().write(true).open(case.pack()).unwrap();
    file.set_len(contents.ranges()[1].offset + 20_000).unwrap();
    let report = verify::verify(&index, &Notices::default(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert!(!report.bad.is_empty());
    assert!(
        report
            .bad
            .iter()
            .all(|bad| bad.expert == id(1) && bad.start + bad.len > 20_000)
    );
    assert!(report.bad[0].reason.contains("end of file"), "{}", report.bad[0].reason);
}

#[test]
fn a_stopped_writer_leaves_nothing() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    for phase in [PackPhase::Write, PackPhase::Verify] {
        let mut stop = |at: PackProgress| {
            if at.phase == phase {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        let sources = [case.shard.clone()];
        let outcome = write_pack(&case.pack(), &contents, &sources, &Notices::default(), &mut stop);
        assert!(matches!(outcome, Err(PackError::Stopped { .. })), "{phase:?}");
        assert_eq!(std::fs::read_dir(case.folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_shard_that_cannot_be_read_leaves_nothing() {
    let case = Case::new();
    let contents = small_contents(&case.shard);
    let file = std::fs::File::options().write(true).open(&case.shard).unwrap();
    file.set_len(60_000).unwrap();
    let error = case.write(&contents).unwrap_err().to_string();
    assert!(error.contains("end of file"), "{error}");
    assert_eq!(std::fs::read_dir(case.folder.path()).unwrap().count(), 1);
    let outcome = write_pack(&case.pack(), &contents, &[], &Notices::default(), &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(matches!(outcome, Err(PackError::Contents { .. })));
}

#[test]
fn large_ranges_go_through_in_several_batches() {
    let folder = tempfile::tempdir().unwrap();
    let shard = folder.path().join("shard");
    let len = 2 * BATCH_BYTES as u64 + 12_345;
    let bytes = noise(len as usize + 500);
    std::fs::write(&shard, &bytes).unwrap();
    for chunk in [CHECKSUM_CHUNK_BYTES, MAX_CHECKSUM_CHUNK_BYTES, 12_288] {
        let contents = PackContents::new(chunk, vec![shard_of(&shard)], vec![range(5, 300, len, 0, len)]).unwrap();
        let pack = folder.path().join("a.pack");
        let mut seen = Vec::new();
        let mut progress = |at: PackProgress| {
            seen.push((at.phase, at.bytes));
            ControlFlow::Continue(())
        };
        write_pack(
            &pack,
            &contents,
            std::slice::from_ref(&shard),
            &Notices::default(),
            &mut progress,
        )
        .unwrap();
        assert!(
            seen.len() >= 6 && seen.contains(&(PackPhase::Write, len)) && seen.ends_with(&[(PackPhase::Verify, len)])
        );
        let file = std::fs::read(&pack).unwrap();
        let offset = contents.ranges()[0].offset as usize;
        assert!(file[offset..][..len as usize] == bytes[300..][..len as usize]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Chunks tile every range, and a range's chunks are those of the whole extent, cut at its borders.
    #[test]
    fn chunks_tile_ranges(offset in 0u64..10_000, len in 1u64..200_000, from in 0u64..60, to in 0u64..60, pages in 1u32..8) {
        let border = |page: u64| (page * 4096).saturating_sub(in_page(offset)).min(len);
        let (start, end) = (border(from.min(to)), border(from.max(to)));
        prop_assume!(start < end);
        let chunk = pages * 4096;
        let (whole, part) = (range(0, offset, len, 0, len), range(0, offset, len, start, end - start));
        prop_assert!(check_range(&part, 1).is_ok());
        let mut next = start;
        for chunk in part.chunks(chunk) {
            prop_assert_eq!(chunk.start, next);
            prop_assert!(chunk.len > 0);
            next += chunk.len;
        }
        prop_assert_eq!(next, end);
        prop_assert_eq!(part.chunks(chunk).count(), part.chunk_count(chunk));
        let cut: Vec<Chunk> = whole
            .chunks(chunk)
            .filter_map(|whole| {
                let (from, to) = (whole.start.max(start), (whole.start + whole.len).min(end));
                (from < to).then(|| Chunk { start: from, len: to - from })
            })
            .collect();
        prop_assert_eq!(part.chunks(chunk).collect::<Vec<_>>(), cut);
    }
}
