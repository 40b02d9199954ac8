//! What the command line means: flags and environment are turned into these once, and nothing below sees either.

use std::ffi::OsString;
use std::path::PathBuf;

use checkpoint::chat::Effort;
use engine::{Isa, KvFormat, PrefixLimits, Reader, Sampling, Trunk, TrunkFormat};

use crate::args::{self, EffortName};
use crate::error::Error;

/// What `compare` reads where no text is given.
const COMPARE_SAMPLE: &str = include_str!("compare/sample.txt");

/// What the process finds around it.
pub struct Surroundings {
    /// Whether somebody types at standard input.
    pub stdin_is_terminal: bool,
    /// The user's folder for cached files.
    pub cache: Option<PathBuf>,
}

impl Surroundings {
    pub fn look() -> Self {
        use std::io::IsTerminal;
        let absolute = |path: &PathBuf| path.is_absolute();
        let home = || std::env::home_dir().filter(absolute);
        let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(absolute);
        Self {
            stdin_is_terminal: std::io::stdin().is_terminal(),
            cache: xdg.or_else(|| match cfg!(target_os = "macos") {
                true => Some(home()?.join("Library/Caches")),
                false => Some(home()?.join(".cache")),
            }),
        }
    }
}

/// Which checkpoint.
pub enum Model {
    Folder(PathBuf),
    /// The demo model, kept in this folder of cached files.
    Demo(Option<PathBuf>),
}

/// What the engine may use.
#[derive(Clone)]
pub struct Machine {
    /// Bytes.
    pub memory: Option<u64>,
    /// Most bytes in which experts stay.
    pub cache: Option<u64>,
    pub threads: Option<usize>,
    pub isa: Option<Isa>,
    /// How drives are read.
    pub reader: Reader,
    pub mla_eps: f32,
    /// How latents are kept.
    pub kv: KvFormat,
    /// Which resident weights are loaded.
    pub trunk: Trunk,
    /// Folder in which it is remembered how fast drives are.
    pub profiles: Option<PathBuf>,
}

/// Where experts are read from.
pub enum Experts {
    /// The model's folder, and these.
    Folders(Vec<PathBuf>),
    /// What a layout file says.
    Layout(PathBuf),
}

/// Where a text comes from.
pub enum TextSource {
    Given(OsString),
    Stdin,
}

/// What is to be continued.
pub enum Input {
    /// A conversation at the terminal.
    Chat(Conversation),
    /// One question of a conversation.
    Question(TextSource, Conversation),
    /// Plain text.
    Raw(TextSource),
    /// Tokens.
    Ids(Vec<u32>),
}

/// What is around the messages of a conversation.
pub struct Conversation {
    pub system: Option<OsString>,
    pub effort: Effort,
}

/// How to generate.
pub struct Generation {
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    pub stops: Vec<String>,
}

/// How to show the result.
pub struct Display {
    pub json: bool,
    pub stats: bool,
    /// Where read events go.
    pub events: Option<PathBuf>,
    pub verbose: bool,
}

/// The prefix store.
pub struct PrefixSettings {
    pub folder: PathBuf,
    pub limits: PrefixLimits,
}

pub struct Run {
    pub model: Model,
    pub input: Input,
    pub generation: Generation,
    pub display: Display,
    pub experts: Experts,
    pub machine: Machine,
    /// Positions to set memory aside for.
    pub context: Option<usize>,
    /// The file to go on from and to save to.
    pub session: Option<PathBuf>,
    pub prefix: Option<PrefixSettings>,
}

pub struct Jobs {
    pub model: Model,
    pub input: PathBuf,
    pub output: PathBuf,
    /// Where a line does not say.
    pub effort: Effort,
    pub max_tokens: Option<usize>,
    /// Most sequences at one time.
    pub batch: Option<usize>,
    /// Most tokens of a line's prompt and answer.
    pub context: Option<usize>,
    pub json: bool,
    pub stats: bool,
    pub verbose: bool,
    pub experts: Experts,
    pub machine: Machine,
}

pub struct Inspect {
    pub model: Model,
    pub json: bool,
    /// Bytes.
    pub memory: Option<u64>,
    /// How latents are kept.
    pub kv: KvFormat,
    /// How the resident matrices are stored.
    pub trunk: TrunkFormat,
}

pub struct Logits {
    pub model: Model,
    pub ids: Vec<u32>,
    pub all: bool,
    pub out: PathBuf,
    pub experts: Experts,
    pub machine: Machine,
}

pub struct Drives {
    pub paths: Vec<PathBuf>,
    pub json: bool,
}

pub struct Place {
    pub model: PathBuf,
    pub plan: PathBuf,
    pub only_packs: bool,
}

pub struct Verify {
    pub packs: Vec<PathBuf>,
}

pub struct Synth {
    pub config: PathBuf,
    pub seed: u64,
    pub out: PathBuf,
    pub sparse: bool,
}

/// What is traced.
pub enum Trace {
    Routing(Routing),
    Export(Export),
}

pub struct Export {
    pub events: PathBuf,
    pub out: Option<PathBuf>,
}

/// Texts to run through a model.
pub enum Texts {
    /// One text.
    Plain(TextSource),
    /// One question.
    Question(TextSource),
    /// One that comes with the program.
    Sample(&'static str),
    /// A file of token ids.
    Ids(PathBuf),
    /// A file of conversations.
    Questions(PathBuf),
}

pub struct Compare {
    pub model: Model,
    pub texts: Texts,
    pub json: bool,
    /// Folder for logits that wait.
    pub scratch: PathBuf,
    pub experts: Experts,
    /// What is compared with: published weights, f32 latents.
    pub exact: Machine,
    /// What is compared.
    pub machine: Machine,
}

pub struct Routing {
    pub model: Model,
    pub texts: Texts,
    /// New tokens for each text.
    pub max_tokens: usize,
    pub json: bool,
    pub machine: Machine,
}

/// One command.
pub enum Settings {
    Run(Box<Run>),
    Jobs(Box<Jobs>),
    Inspect(Inspect),
    Logits(Logits),
    Drives(Drives),
    Place(Place),
    Verify(Verify),
    Synth(Synth),
    Trace(Trace),
    Compare(Box<Compare>),
}

impl Settings {
    /// # Errors
    ///
    /// [`Error::Usage`] for flags that make no sense together.
    pub fn new(args: args::Args, around: &Surroundings) -> Result<Self, Error> {
        Ok(match args.command {
            args::Command::Run(args) => Settings::Run(Box::new(run(*args, around)?)),
            args::Command::Jobs(args) => Settings::Jobs(Box::new(Jobs {
                model: model(args.model, around),
                input: args.input,
                output: args.output,
                effort: args.thinking_effort.into(),
                max_tokens: args.max_tokens,
                batch: args.batch,
                context: args.context,
                json: args.json,
                stats: args.stats,
                verbose: args.verbose,
                experts: experts(args.experts),
                machine: machine(args.machine, around),
            })),
            args::Command::Inspect(args) => Settings::Inspect(Inspect {
                model: model(args.dir, around),
                json: args.json,
                memory: args.memory,
                kv: args.kv,
                trunk: args.trunk,
            }),
            args::Command::Logits(args) => Settings::Logits(Logits {
                model: model(args.model, around),
                ids: args.ids.0,
                all: args.all,
                out: args.out,
                experts: experts(args.experts),
                machine: machine(args.machine, around),
            }),
            args::Command::Compare(args) => Settings::Compare(Box::new(compare(*args, around))),
            args::Command::Drives(args) => Settings::Drives(Drives {
                paths: match args.paths.is_empty() {
                    true => vec![PathBuf::from(".")],
                    false => args.paths,
                },
                json: args.json,
            }),
            args::Command::Place(args) => Settings::Place(Place {
                model: args.model,
                plan: args.plan,
                only_packs: args.only_packs,
            }),
            args::Command::Verify(args) => Settings::Verify(Verify { packs: args.packs }),
            args::Command::Synth(args) => Settings::Synth(Synth {
                config: args.config,
                seed: args.seed,
                out: args.out,
                sparse: args.sparse,
            }),
            args::Command::Trace(args) => Settings::Trace(match args.command {
                args::TraceCommand::Export(args) => Trace::Export(Export {
                    events: args.events,
                    out: args.out,
                }),
                args::TraceCommand::Routing(args) => Trace::Routing(routing(args, around)?),
            }),
        })
    }
}

fn routing(args: args::RoutingArgs, around: &Surroundings) -> Result<Routing, Error> {
    let Some(texts) = texts(args.texts) else {
        let problem = "found no text, expected --prompt, --ids-file or --questions";
        return Err(Error::Usage(problem.to_owned()));
    };
    Ok(Routing {
        model: model(args.model, around),
        texts,
        max_tokens: args.max_tokens,
        json: args.json,
        machine: machine(args.machine, around),
    })
}

/// The texts that are named; `None` where none is.
fn texts(args: args::TextsArgs) -> Option<Texts> {
    match (args.prompt.map(text_source), args.ids_file, args.questions) {
        (Some(source), _, _) if args.raw => Some(Texts::Plain(source)),
        (Some(source), _, _) => Some(Texts::Question(source)),
        (None, Some(file), _) => Some(Texts::Ids(file)),
        (None, None, Some(file)) => Some(Texts::Questions(file)),
        (None, None, None) => None,
    }
}

fn compare(args: args::CompareArgs, around: &Surroundings) -> Compare {
    let mut machine_args = args.machine;
    if machine_args.trunk.is_none() && machine_args.kv == KvFormat::F32 {
        machine_args.trunk = Some(TrunkFormat::Int8);
    }
    let scratch = args.scratch.or_else(|| machine_args.trunk_folder.clone());
    let own = || Some(around.cache.as_ref()?.join("anabranch"));
    let machine = machine(machine_args, around);
    Compare {
        model: model(args.model, around),
        texts: texts(args.texts).unwrap_or(Texts::Sample(COMPARE_SAMPLE)),
        json: args.json,
        scratch: scratch.or_else(own).unwrap_or_else(std::env::temp_dir),
        experts: experts(args.experts),
        exact: Machine {
            trunk: Trunk::Published,
            kv: KvFormat::F32,
            ..machine.clone()
        },
        machine,
    }
}

fn run(args: args::RunArgs, around: &Surroundings) -> Result<Run, Error> {
    let conversation = Conversation {
        system: args.system,
        effort: args.thinking_effort.into(),
    };
    let input = match (args.ids, args.prompt) {
        (Some(ids), _) => Input::Ids(ids.0),
        (None, Some(prompt)) => {
            let source = text_source(prompt);
            match args.raw {
                true => Input::Raw(source),
                false => Input::Question(source, conversation),
            }
        }
        (None, None) if args.raw && args.session.is_some() => Input::Raw(TextSource::Given(OsString::new())),
        (None, None) if !around.stdin_is_terminal => {
            return Err(Error::Usage(
                "found no prompt, and standard input is no terminal to chat at, expected --prompt or --ids; \
                 to read the prompt from standard input give --prompt -"
                    .to_owned(),
            ));
        }
        (None, None) if args.raw || args.json => {
            return Err(Error::Usage(
                "found no prompt, expected --prompt or --ids with --raw and --json; without both flags a chat begins"
                    .to_owned(),
            ));
        }
        (None, None) => Input::Chat(conversation),
    };
    Ok(Run {
        model: model(args.model, around),
        input,
        generation: Generation {
            max_tokens: args.max_tokens,
            sampling: sampling(&args.sampling),
            stops: args.stop,
        },
        display: Display {
            json: args.json,
            stats: args.stats,
            events: args.events,
            verbose: args.verbose,
        },
        experts: experts(args.experts),
        machine: machine(args.machine, around),
        context: args.context,
        prefix: prefix(args.prefix, around)?,
        session: args.session,
    })
}

fn prefix(args: args::PrefixArgs, around: &Surroundings) -> Result<Option<PrefixSettings>, Error> {
    let folder = match args.prefix_store.to_str() {
        Some("off") => return Ok(None),
        Some("") => around.cache.as_ref().ok_or(Error::NoCache)?.join("anabranch/prefixes"),
        _ => PathBuf::from(args.prefix_store),
    };
    let usual = PrefixLimits::default();
    Ok(Some(PrefixSettings {
        folder,
        limits: PrefixLimits {
            held: args.prefix_held.unwrap_or(usual.held),
            daily: args.prefix_daily.unwrap_or(usual.daily),
        },
    }))
}

fn text_source(text: OsString) -> TextSource {
    match text == "-" {
        true => TextSource::Stdin,
        false => TextSource::Given(text),
    }
}

impl From<EffortName> for Effort {
    fn from(name: EffortName) -> Self {
        match name {
            EffortName::Off => Effort::Off,
            EffortName::Low => Effort::Low,
            EffortName::High => Effort::High,
            EffortName::Max => Effort::Max,
        }
    }
}

fn sampling(args: &args::SamplingArgs) -> Sampling {
    let all = Sampling::default();
    Sampling {
        temperature: args.temperature.unwrap_or(all.temperature),
        top_k: args.top_k.unwrap_or(all.top_k),
        top_p: args.top_p.unwrap_or(all.top_p),
        min_p: args.min_p.unwrap_or(all.min_p),
        seed: args.seed.unwrap_or(all.seed),
    }
}

fn model(dir: Option<PathBuf>, around: &Surroundings) -> Model {
    dir.map_or(Model::Demo(around.cache.clone()), Model::Folder)
}

fn experts(args: args::ExpertsArgs) -> Experts {
    args.layout.map_or(Experts::Folders(args.drives), Experts::Layout)
}

fn machine(args: args::MachineArgs, around: &Surroundings) -> Machine {
    let own = || Some(around.cache.as_ref()?.join("anabranch/trunks"));
    Machine {
        memory: args.memory,
        cache: args.cache,
        // At most 1024, see the command line.
        threads: args.threads.map(|n| n as usize),
        isa: args.isa,
        reader: args.reader,
        mla_eps: args.mla_eps,
        kv: args.kv,
        trunk: match args.trunk.unwrap_or_default() {
            TrunkFormat::Bf16 => Trunk::Published,
            TrunkFormat::Int8 => Trunk::Int8 {
                folder: args.trunk_folder.or_else(own),
            },
        },
        profiles: around.cache.as_ref().map(|cache| cache.join("anabranch")),
    }
}
