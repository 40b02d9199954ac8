//! `anabranch run`: an answer to one prompt, or a chat.

use std::io::{IsTerminal, Read};
use std::time::Instant;

use checkpoint::Checkpoint;
use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use engine::{Engine, Finish, Request, Transcript};

use crate::answer::{Answer, Answerer};
use crate::args::{DEFAULT_CHAT_CONTEXT, DEFAULT_MAX_TOKENS};
use crate::chat::Chat;
use crate::error::Error;
use crate::events::EventLog;
use crate::model::{self, Needs};
use crate::output::{self, Screen};
use crate::session::{self, SessionFile};
use crate::settings::{Conversation, Display, Input, Run, TextSource};
use crate::signals::Interrupt;

/// Rows of the largest pass of a chat, whose prompts are not known in advance.
const CHAT_PASS_ROWS: usize = 512;

/// A prompt with all that precedes it, and what becomes of it.
struct Work {
    prompt: Vec<u32>,
    transcript: Transcript,
    /// The conversation up to the question, and how much is thought before the answer.
    messages: Option<(Vec<Message>, Effort)>,
}

pub fn run(settings: &Run, interrupt: &Interrupt) -> Result<(), Error> {
    let stops = || settings.generation.stops.clone();
    let text = |before: &SessionFile, new: &[u32]| Work {
        prompt: [&before.tokens, new].concat(),
        transcript: Transcript::raw(stops()),
        messages: None,
    };
    match &settings.input {
        Input::Chat(conversation) => chat(settings, conversation, interrupt),
        Input::Ids(ids) => once(settings, false, interrupt, |_, before| Ok(text(before, ids))),
        Input::Raw(source) => once(settings, false, interrupt, |tokenizer, before| {
            let new = read_text(source)?;
            if new.is_empty() && before.tokens.is_empty() {
                return Err(Error::EmptyRaw);
            }
            Ok(text(before, &tokenizer.encode_ordinary(&new)))
        }),
        Input::Question(source, conversation) => once(settings, true, interrupt, |tokenizer, before| {
            let mut messages = beginning(conversation, before)?;
            messages.push(Message::new(Role::User, read_text(source)?));
            Ok(Work {
                prompt: render(tokenizer, &messages, conversation.effort),
                transcript: Transcript::chat(conversation.effort, stops()),
                messages: Some((messages, conversation.effort)),
            })
        }),
    }
}

/// One prompt, one answer.
fn once(
    settings: &Run,
    conversation: bool,
    interrupt: &Interrupt,
    work: impl FnOnce(&Tokenizer, &SessionFile) -> Result<Work, Error>,
) -> Result<(), Error> {
    let _working = interrupt.working();
    let start = Instant::now();
    let mut session = match &settings.session {
        Some(path) => SessionFile::open(path, conversation)?,
        None => SessionFile::none(conversation),
    };
    let dir = model::folder(&settings.model)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let tokenizer = Tokenizer::load(&dir)?;
    let Work {
        prompt,
        transcript,
        messages,
    } = work(&tokenizer, &session)?;
    // Without a new token there is nothing to feed, and the state alone gives no logits.
    if !conversation && settings.session.is_some() && prompt.len() <= session.stored_tokens() {
        return Err(Error::EmptyRaw);
    }
    model::check_ids(&checkpoint, &prompt)?;
    let room = Room::new(
        prompt.len(),
        settings.generation.max_tokens,
        settings.context,
        checkpoint.config().max_position_embeddings,
    )?;
    let needs = Needs {
        positions: room.positions.max(session.stored_tokens()),
        pass_rows: prompt.len(),
        sequences: 1,
        all_logits: false,
    };
    let stop_ids = checkpoint.stop_ids().to_vec();
    let mut engine = match model::load(checkpoint, &settings.experts, &settings.machine, &needs, interrupt) {
        Err(error) if error.is_interrupt() => {
            let trunk = settings.machine.trunk.format();
            let answer = Answer::none(prompt, trunk, start.elapsed().as_secs_f64());
            return finish(&answer, &settings.display);
        }
        loaded => loaded?,
    };
    if settings.display.verbose {
        describe(&engine);
    }
    let stored = session.restore(&engine)?;
    let mut answerer = Answerer {
        store: session::prefix_store(settings.prefix.as_ref(), &engine)?,
        engine: &mut engine,
        tokenizer: &tokenizer,
    };
    let mut begun = answerer.begin(stored, &prompt);
    let seen = begun.sequence.ids().len();
    if settings.session.is_some() {
        begun.sequence.decode_in_whole_passes();
    }
    let load_s = start.elapsed().as_secs_f64();
    let request = Request {
        prompt: prompt[seen..].to_vec(),
        max_tokens: room.max_tokens,
        stop_ids,
        sampling: settings.generation.sampling,
    };
    let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
    let (mut no_text, mut no_side) = (std::io::sink(), std::io::sink());
    let mut screen = match settings.display.json {
        true => Screen::new(&mut no_text, &mut no_side, false),
        false => Screen::new(&mut stdout, &mut stderr, std::io::stderr().is_terminal()),
    };
    let log = start_log(&settings.display, answerer.engine)?;
    let made = answerer.answer(&mut begun, request, transcript, &mut screen, interrupt.cancel());
    model::pass_notices_on(answerer.engine);
    log.map(EventLog::finish).transpose()?;
    let mut made = made?;
    made.stats.load_s = load_s;
    made.stats.session_tokens_restored = seen - begun.from_store;
    let messages = messages.map(|(mut messages, effort)| {
        messages.push(made.message(effort));
        messages
    });
    let saved = match &settings.session {
        Some(_) => session.save(answerer.engine, &begun.sequence, &prompt, &made, messages.as_deref()),
        None => Ok(()),
    };
    // The answer is shown even where it cannot be saved.
    finish(&made, &settings.display).and(saved)
}

/// Shows what is shown at the end.
fn finish(answer: &Answer, display: &Display) -> Result<(), Error> {
    if display.stats {
        output::say(answer.table().trim_end());
    }
    if display.json {
        output::print(&answer.json()?)?;
    }
    match answer.finish_reason {
        Finish::Cancelled => Err(Error::Interrupted),
        Finish::Stop | Finish::Length => Ok(()),
    }
}

fn chat(settings: &Run, conversation: &Conversation, interrupt: &Interrupt) -> Result<(), Error> {
    let loading = interrupt.working();
    let dir = model::folder(&settings.model)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let tokenizer = Tokenizer::load(&dir)?;
    let limit = checkpoint.config().max_position_embeddings;
    let mut session = match &settings.session {
        Some(path) => SessionFile::open(path, true)?,
        None => SessionFile::none(true),
    };
    // A session that has grown beyond the usual room needs some for the next answer.
    let usual = DEFAULT_CHAT_CONTEXT.max(session.stored_tokens() + 2 * DEFAULT_MAX_TOKENS);
    let needs = Needs {
        positions: settings.context.unwrap_or(usual.min(limit)),
        pass_rows: CHAT_PASS_ROWS,
        sequences: 1,
        all_logits: false,
    };
    let messages = beginning(conversation, &session)?;
    let mut engine = model::load(checkpoint, &settings.experts, &settings.machine, &needs, interrupt)?;
    drop(loading);
    if settings.display.verbose {
        describe(&engine);
    }
    let log = start_log(&settings.display, &engine)?;
    let sequence = session.restore(&engine)?;
    let mut chat = Chat {
        answerer: Answerer {
            store: session::prefix_store(settings.prefix.as_ref(), &engine)?,
            engine: &mut engine,
            tokenizer: &tokenizer,
        },
        generation: &settings.generation,
        effort: conversation.effort,
        messages,
        from_session: sequence.is_some(),
        sequence,
        session: settings.session.is_some().then_some(session),
        stats: settings.display.stats,
    };
    let (mut stdout, mut stderr) = (std::io::stdout(), std::io::stderr());
    let mut screen = Screen::new(&mut stdout, &mut stderr, std::io::stderr().is_terminal());
    let talked = chat.talk(&mut std::io::stdin().lock(), &mut screen, interrupt);
    log.map(EventLog::finish).transpose()?;
    talked
}

/// Begins the file of `--events`, if there shall be one.
fn start_log(display: &Display, engine: &Engine) -> Result<Option<EventLog>, Error> {
    let path = display.events.as_ref();
    path.map(|path| EventLog::start(path, engine)).transpose()
}

/// The messages before a question: those of the session, or the opening of a new conversation.
fn beginning(conversation: &Conversation, before: &SessionFile) -> Result<Vec<Message>, Error> {
    let opening = opening(conversation)?;
    match &before.messages {
        Some(messages) if !messages.is_empty() => match opening.is_empty() || messages.starts_with(&opening) {
            true => Ok(messages.clone()),
            false => Err(Error::Usage(
                "--system: the session began with other instructions, expected the same or none; leave out --system, or name a \
                 new file with --session"
                    .to_owned(),
            )),
        },
        _ => Ok(opening),
    }
}

/// What precedes the first question.
fn opening(conversation: &Conversation) -> Result<Vec<Message>, Error> {
    let Some(system) = &conversation.system else {
        return Ok(vec![]);
    };
    let system = utf8(system.as_encoded_bytes(), "--system")?;
    Ok(vec![Message::new(Role::System, system)])
}

/// The text of `--prompt`.
pub fn read_text(source: &TextSource) -> Result<String, Error> {
    match source {
        TextSource::Given(text) => utf8(text.as_encoded_bytes(), "--prompt"),
        TextSource::Stdin => {
            let mut bytes = vec![];
            std::io::stdin().read_to_end(&mut bytes).map_err(Error::Input)?;
            utf8(&bytes, "standard input")
        }
    }
}

/// The text of bytes that came from `place`.
pub fn utf8(bytes: &[u8], place: &'static str) -> Result<String, Error> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err(Error::NotUtf8 {
            place,
            byte: bytes[error.valid_up_to()],
            offset: error.valid_up_to(),
        }),
    }
}

/// How long the answer may get, and the positions that it needs.
#[derive(Debug, PartialEq)]
pub struct Room {
    pub max_tokens: usize,
    pub positions: usize,
}

impl Room {
    /// Room for an answer to a prompt of `prompt` tokens where the model goes up to `limit`.
    pub fn new(prompt: usize, max_tokens: Option<usize>, context: Option<usize>, limit: usize) -> Result<Self, Error> {
        let most = context.unwrap_or(limit);
        let left = most.saturating_sub(prompt);
        let max_tokens = max_tokens.unwrap_or(DEFAULT_MAX_TOKENS.min(left).max(1));
        if max_tokens > left {
            let (limited_by, next) = match context {
                Some(_) => ("--context", "raise --context, or ask for fewer tokens"),
                None => (
                    "max_position_embeddings of the model",
                    "shorten the prompt, or ask for fewer tokens",
                ),
            };
            return Err(Error::TooLong {
                prompt,
                max_tokens,
                limit: most,
                limited_by,
                next,
            });
        }
        Ok(Self {
            max_tokens,
            positions: context.unwrap_or(prompt + max_tokens),
        })
    }
}

/// What `--verbose` tells.
pub fn describe(engine: &Engine) {
    output::say(format_args!("memory:\n{}", engine.plan().to_string().trim_end()));
    output::say(format_args!(
        "kernels: {}, {} threads, numerics {}",
        engine.isa(),
        engine.threads(),
        engine::NUMERICS_VERSION
    ));
    output::say(format_args!("experts are read with {}", engine.reader()));
    for folder in engine.folders() {
        let note = match folder.note.is_empty() {
            true => String::new(),
            false => format!(" ({})", folder.note),
        };
        output::say(format_args!(
            "experts: {}{note}: {} shards, {} packs, {}",
            folder.path.display(),
            folder.shards,
            folder.packs,
            engine::human(folder.expert_bytes)
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_takes_the_room_there_is() {
        let room = |max_tokens, positions| Room { max_tokens, positions };
        assert_eq!(Room::new(10, None, None, 8192).unwrap(), room(512, 522));
        assert_eq!(Room::new(10, None, None, 100).unwrap(), room(90, 100));
        assert_eq!(Room::new(10, None, Some(50), 100).unwrap(), room(40, 50));
        assert_eq!(Room::new(10, Some(40), Some(50), 100).unwrap(), room(40, 50));
        for (prompt, max_tokens, context, words) in [
            (
                10,
                Some(41),
                Some(50),
                "10 tokens and --max-tokens 41 make 51, expected at most 50 (--context)",
            ),
            (
                10,
                Some(91),
                None,
                "make 101, expected at most 100 (max_position_embeddings",
            ),
            (100, None, None, "100 tokens and --max-tokens 1 make 101"),
            (
                60,
                None,
                Some(50),
                "60 tokens and --max-tokens 1 make 61, expected at most 50",
            ),
        ] {
            let error = Room::new(prompt, max_tokens, context, 100).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_first_wrong_byte_is_named() {
        assert_eq!(utf8("é".as_bytes(), "x").unwrap(), "é");
        let error = utf8(b"ab\xC3", "x").unwrap_err().to_string();
        assert!(error.starts_with("x: found byte 0xc3 at offset 2"), "{error}");
    }
}
