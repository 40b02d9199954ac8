//! The engine: one model on one machine, and the one pass that everything goes through.

use crate::batch::expected_experts;
use crate::error::Error;
use crate::experts::{Checks, PassExperts};
use crate::generate::{Cancel, PromptProgress, Request};
use crate::measure::Measure;
use crate::memory::{MemoryPlan, Wishes};
use crate::placement::{Checksums, FolderReport, Placement};
use crate::probe::{LayerProbe, Probe, Watcher};
use crate::resident::{Embedding, Resident};
use crate::sequence::Sequence;
use crate::session::Identity;
use crate::trunk::{LoadPhase, LoadProgress, Making, Trunk, TrunkError, TrunkFormat};
use checkpoint::{Checkpoint, Class, K3Config};
use drives::{Arena, MonotonicClock, Notice, Notices, Profile, Reader, StreamOptions, Streamer};
use kernels::{Cpu, Isa, KvFormat, Rows};
use models::kimi_k3::{DEFAULT_MLA_EPS, Input, KimiK3, Segment, Workspace};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// How to open a model.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes to be divided; [`default_budget`](crate::default_budget) gives the usual number.
    pub memory: u64,
    /// Tokens that a sequence may reach.
    pub positions: usize,
    /// Most sequences that are useful at one time. There is room for as many as fit, at least 1: [`MemoryPlan::sequences`].
    pub sequences: usize,
    /// Rows of the largest pass that would be useful: the length of the prompt, say.
    pub pass_rows: usize,
    /// Whether the logits of all rows of a pass are wanted at once.
    pub all_logits: bool,
    /// Slots for experts in flight; by default as many as fit and are of use.
    pub slots: Option<usize>,
    /// Most bytes in which experts stay after their use; by default what is left of the memory. 0 turns the cache off.
    pub cache: Option<u64>,
    /// Compute threads.
    pub threads: usize,
    /// The kernels; all give the same bits.
    pub isa: Isa,
    /// Where experts are read from.
    pub placement: Placement,
    /// Whether drives are measured first.
    pub measure: Measure,
    /// How they are read.
    pub reader: Reader,
    /// Whether experts are compared with the checksums of packs before they are used. It costs about 0.05 seconds of one core
    /// for a gigabyte, more where the bytes have left the cache.
    pub check: bool,
    /// Epsilon of the two norms inside MLA.
    pub mla_eps: f32,
    /// How latents are stored. bf16 halves what a token of context costs and gives other bits.
    pub kv: KvFormat,
    /// Which resident weights are loaded.
    pub trunk: Trunk,
    /// Ends the loading early, with [`Error::Cancelled`].
    pub cancel: Cancel,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            memory: crate::memory::default_budget(),
            positions: 4096,
            sequences: 1,
            pass_rows: 512,
            all_logits: false,
            slots: None,
            cache: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            isa: Isa::detect(),
            placement: Placement::default(),
            measure: Measure::Never,
            reader: Reader::default(),
            check: true,
            mla_eps: DEFAULT_MLA_EPS,
            kv: KvFormat::F32,
            trunk: Trunk::Published,
            cancel: Cancel::default(),
        }
    }
}

/// Sums since the engine was opened. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Passes run.
    pub passes: u64,
    /// Rows of all passes.
    pub rows: u64,
    /// Rows of the largest pass.
    pub most_rows: u64,
    /// Over all passes and layers: the union of the rows' routes, times the bytes of an expert.
    pub expert_bytes_needed: u64,
    /// Of these, the bytes of experts that were in memory already. The others are read.
    pub expert_bytes_cached: u64,
    /// Expert bytes asked for and read.
    pub expert_bytes_read: u64,
    /// The same, widened to whole pages.
    pub device_bytes: u64,
    /// Expert bytes that were compared with a checksum and found right, or mended.
    pub expert_bytes_checked: u64,
}

/// One sequence's part of a pass.
pub struct PassRows<'a> {
    /// The sequence; advanced by the pass.
    pub sequence: &'a mut Sequence,
    /// Its next tokens, at least one.
    pub ids: &'a [u32],
}

/// A model, ready to run.
pub struct Engine {
    checkpoint: Checkpoint,
    cpu: Cpu,
    model: KimiK3<Cpu>,
    workspace: Workspace<Rows>,
    streamer: Streamer,
    checksums: Option<Checksums>,
    folders: Vec<FolderReport>,
    profile: Option<Profile>,
    embedding: Embedding,
    plan: MemoryPlan,
    notices: Notices,
    stats: Stats,
    load_s: f64,
    reader: String,
    mla_eps: f32,
    pub(crate) identity: OnceLock<Identity>,
}

impl Engine {
    /// Divides the memory, converts the trunk where that is asked for and was not done before, and loads what stays resident.
    pub fn open(
        checkpoint: Checkpoint,
        options: &Options,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, Error> {
        let start = Instant::now();
        let config = checkpoint.config();
        if options.positions > config.max_position_embeddings {
            return Err(Error::ContextLimit {
                wanted: options.positions,
                limit: config.max_position_embeddings,
            });
        }
        check_supported(&checkpoint)?;
        let notices = Notices::default();
        let placed = options.placement.survey(&checkpoint, &notices)?;
        let layout = Arc::new(placed.layout);
        let checksums = options
            .check
            .then(|| Checksums::new(Arc::clone(&layout), placed.packs, &notices));
        let profile = options.measure.profile(&layout, &notices)?;
        let wishes = Wishes {
            budget: options.memory,
            positions: options.positions,
            sequences: options.sequences,
            pass_rows: options.pass_rows,
            all_logits: options.all_logits,
            slots: options.slots,
            threads: options.threads,
            kv: options.kv,
            trunk: options.trunk.format(),
            cache: options.cache,
        };
        let plan = MemoryPlan::new(config, checkpoint.schema(), layout.slot_bytes() as u64, &wishes)?;
        let cpu = Cpu::new(options.isa, options.threads)?;
        let sizes = checkpoint.sizes();
        let making = || Making {
            checkpoint: &checkpoint,
            threads: cpu.threads(),
            notices: &notices,
            cancel: &options.cancel,
        };
        let mut identity = OnceLock::new();
        let converted = match &options.trunk {
            Trunk::Published => None,
            Trunk::Int8 { folder } => {
                let folder = folder.as_deref().ok_or(TrunkError::NoFolder)?;
                let read = Identity::read(&checkpoint)?;
                identity = OnceLock::from(read);
                Some(making().find_or_make(folder, read, progress)?)
            }
        };
        let converted = converted.as_ref();
        let published = sizes.trunk() - sizes.of(Class::Embedding);
        let of = converted.map_or(published, |file| published - file.published_bytes() + file.bytes());
        let mut report = |done| {
            progress(LoadProgress {
                phase: LoadPhase::Load,
                done,
                of,
            });
        };
        let converted = converted.map(|file| (file, making()));
        let mut resident = Resident::new(&checkpoint, &notices, &options.cancel, converted, &mut report);
        let model = KimiK3::load(&cpu, config, options.mla_eps, &mut resident)?;
        let workspace = Workspace::new(&cpu, config, plan.pass_rows);
        let clock = Arc::new(MonotonicClock::new());
        let arena = Arena::new((plan.slots + plan.cache) as usize, layout.slot_bytes())?;
        let depths = profile.as_ref().map(Profile::depths).unwrap_or_default();
        let backend = options.reader.open(&layout, &arena, &depths, clock.clone(), &notices)?;
        let reader = backend.describe();
        let stream = StreamOptions {
            tuning: profile.as_ref().map(Profile::tuning).unwrap_or_default(),
            notices: notices.clone(),
            cache_slots: plan.cache_slots,
            ..StreamOptions::default()
        };
        let streamer = Streamer::start(layout, arena, backend, clock, &stream)?;
        let embedding = Embedding::open(&checkpoint, &notices)?;
        Ok(Self {
            cpu,
            model,
            workspace,
            streamer,
            checksums,
            folders: placed.folders,
            profile,
            embedding,
            plan,
            notices,
            stats: Stats::default(),
            load_s: start.elapsed().as_secs_f64(),
            reader,
            mla_eps: options.mla_eps,
            identity,
            checkpoint,
        })
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The model's dimensions.
    pub fn config(&self) -> &K3Config {
        self.model.config()
    }

    /// How the resident matrices are stored.
    pub fn trunk(&self) -> TrunkFormat {
        self.plan.trunk_format
    }

    /// How the memory was divided.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The folders that experts are read from, and what each holds.
    pub fn folders(&self) -> &[FolderReport] {
        &self.folders
    }

    /// How fast the drives were found to be; `None` when they were not measured.
    pub fn profile(&self) -> Option<&Profile> {
        self.profile.as_ref()
    }

    /// The streamer, for its sums, reports and events.
    pub fn streamer(&self) -> &Streamer {
        &self.streamer
    }

    /// Waits until no read is in flight. Then the streamer's sums say what became of each byte.
    pub fn settle(&mut self) {
        self.streamer.wait_for_reads();
    }

    /// Things that the user should know, since the last call.
    pub fn notices(&self) -> Vec<Notice> {
        self.notices.take()
    }

    /// The kernels in use.
    pub fn isa(&self) -> Isa {
        self.cpu.isa()
    }

    /// Compute threads in use.
    pub fn threads(&self) -> usize {
        self.cpu.threads()
    }

    /// How experts are read, such as "io_uring, registered memory".
    pub fn reader(&self) -> &str {
        &self.reader
    }

    /// Seconds that opening took.
    pub fn load_s(&self) -> f64 {
        self.load_s
    }

    /// Sums so far.
    pub fn stats(&self) -> Stats {
        let c = self.streamer.counters();
        Stats {
            expert_bytes_cached: c.cached_bytes,
            expert_bytes_read: c.expert_bytes_read,
            device_bytes: c.device_bytes,
            ..self.stats
        }
    }

    /// A sequence before its first token.
    pub fn new_sequence(&self) -> Sequence {
        Sequence::new(self.model.new_state(&self.cpu, self.plan.kv), vec![])
    }

    /// The epsilon of the two norms inside MLA.
    pub fn mla_eps(&self) -> f32 {
        self.mla_eps
    }

    pub(crate) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    pub(crate) fn check_positions(&self, wanted: usize) -> Result<(), Error> {
        let positions = self.plan.positions;
        if wanted > positions {
            Err(Error::Context { wanted, positions })
        } else {
            Ok(())
        }
    }

    /// Refuses what can never be generated, before any work.
    pub(crate) fn check_request(&self, request: &Request) -> Result<(), Error> {
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Error::NoTokens);
        }
        self.check_ids(&request.prompt)?;
        // The last token is chosen but not fed.
        self.check_positions((request.prompt.len() - 1).saturating_add(request.max_tokens))
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), Error> {
        let last = self.config().vocab_size as u32 - 1;
        match ids.iter().find(|&&id| id > last) {
            Some(&found) => Err(Error::TokenId { found, last }),
            None => Ok(()),
        }
    }

    /// Feeds `ids` in passes as large as memory allows and returns the logits after the last one, `[vocab]`. `progress` hears of
    /// each layer.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        ids: &[u32],
        cancel: &Cancel,
        progress: &mut dyn FnMut(PromptProgress),
    ) -> Result<Vec<f32>, Error> {
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let c = self.config();
        let layers = c.num_hidden_layers;
        let (experts, top_k) = (c.num_experts, c.num_experts_per_token);
        let weight = |rows: usize| expected_experts(experts, top_k, rows);
        let passes = ids.chunks(self.plan.pass_rows);
        let whole: f64 = passes.clone().map(|part| weight(part.len())).sum();
        let (mut logits, mut done, mut before) = (vec![], 0, 0.0);
        for part in passes {
            let (rows, of) = (part.len(), ids.len());
            let mut tell = |layer: usize| {
                let share = (before + weight(rows) * (layer + 1) as f64 / layers as f64) / whole;
                let done = if layer + 1 < layers { done } else { done + rows };
                progress(PromptProgress { done, of, share });
            };
            let wanted = [rows - 1];
            let logits_of: &[usize] = if done + rows == of { &wanted } else { &[] };
            let pass = &mut [PassRows {
                sequence: &mut *sequence,
                ids: part,
            }];
            logits = self.pass(pass, logits_of, cancel, Some(&mut LayerProbe(&mut tell)))?;
            done += rows;
            before += weight(rows);
        }
        Ok(logits)
    }

    /// One pass over the rows of any number of sequences: the only way through the model. Returns the logits of the rows
    /// `logits_of`, `[logits_of, vocab]`. Rows are numbered through the sequences in their order.
    pub fn pass(
        &mut self,
        parts: &mut [PassRows<'_>],
        logits_of: &[usize],
        cancel: &Cancel,
        probe: Option<&mut dyn Probe>,
    ) -> Result<Vec<f32>, Error> {
        let mut ids = vec![];
        for part in parts.iter() {
            part.sequence.check_whole()?;
            if part.ids.is_empty() {
                return Err(Error::EmptyPrompt);
            }
            self.check_positions(part.sequence.ids.len() + part.ids.len())?;
            ids.extend_from_slice(part.ids);
        }
        self.check_ids(&ids)?;
        if ids.len() > self.plan.pass_rows {
            return Err(Error::PassRows {
                found: ids.len(),
                planned: self.plan.pass_rows,
            });
        }
        if let Some(&found) = logits_of.iter().find(|&&row| row >= ids.len()) {
            return Err(Error::NoSuchRow { found, rows: ids.len() });
        }
        cancel.check()?;
        let embeddings = self.embedding.rows(&ids)?;
        let mut segments: Vec<Segment<'_, Cpu>> = parts
            .iter_mut()
            .map(|part| {
                // Only a pass that ends well takes this back.
                part.sequence.spoilt = true;
                Segment {
                    state: &mut part.sequence.state,
                    rows: part.ids.len(),
                }
            })
            .collect();
        let needed = &mut self.stats.expert_bytes_needed;
        let bytes = &mut self.stats.expert_bytes_checked;
        let checks = self.checksums.as_ref().map(|checksums| Checks { checksums, bytes });
        let slots = self.plan.slot_count;
        let mut experts = PassExperts::new(&self.checkpoint, &mut self.streamer, cancel, needed, checks, slots);
        let input = Input {
            segments: &mut segments,
            embeddings: &embeddings,
            logits_of,
        };
        let mut watcher = probe.map(|probe| Watcher { cpu: &self.cpu, probe });
        let watcher = watcher.as_mut().map(|w| w as &mut dyn models::kimi_k3::Probe<Cpu>);
        let logits = self
            .model
            .forward(&self.cpu, &mut self.workspace, input, &mut experts, watcher)?;
        let vocab = self.model.config().vocab_size;
        if let Some(at) = logits
            .chunks_exact(vocab)
            .position(|row| row.iter().any(|l| l.is_nan()))
        {
            return Err(Error::NanLogits {
                path: self.checkpoint.dir().to_path_buf(),
                row: logits_of[at],
            });
        }
        for part in parts {
            part.sequence.ids.extend_from_slice(part.ids);
            part.sequence.spoilt = false;
        }
        self.stats.passes += 1;
        self.stats.rows += ids.len() as u64;
        self.stats.most_rows = self.stats.most_rows.max(ids.len() as u64);
        Ok(logits)
    }
}

/// Refuses a model that is in order but beyond what the kernels and the streamer are made for.
fn check_supported(checkpoint: &Checkpoint) -> Result<(), Error> {
    let c = checkpoint.config();
    let refuse = |what, found, expected: String| {
        Err(Error::Unsupported {
            path: checkpoint.dir().join("config.json"),
            what,
            found,
            expected,
        })
    };
    let blocks = c.num_hidden_layers.div_ceil(c.attn_res_block_size);
    if blocks >= kernels::MAX_SOURCES {
        let expected = format!(
            "at most {} blocks of attn_res_block_size layers",
            kernels::MAX_SOURCES - 1
        );
        return refuse("attention residual blocks", blocks, expected);
    }
    if c.moe_layers() == 0 {
        return refuse("layers with routed experts", 0, "at least 1".into());
    }
    Ok(())
}
