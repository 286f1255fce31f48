//! Execution of a `grub.cfg`: variables, functions, conditions, and what all that may cost.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::commands;
use super::script::{self, Block, Command, Part, What, Word};
use super::test_command::test;
use super::{GrubError, GrubErrorKind};
use crate::bls::Entry;
use crate::files::{Files, normalize};
use crate::volumes::{FileKind, Volume, VolumeId};
use crate::{FileRef, limits};

/// What goes on after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    /// The next command.
    Next,
    /// Nothing of this function.
    Return,
    /// Nothing at all: another menu is shown, or a kernel is started.
    Stop,
}

/// One entry of a menu.
#[derive(Clone, Debug)]
pub(super) struct MenuEntry {
    pub(super) title: String,
    pub(super) id: Option<String>,
    pub(super) what: Entered,
}

/// What an entry does when it is chosen.
#[derive(Clone, Debug)]
pub(super) enum Entered {
    /// It executes commands.
    Commands {
        block: Block,
        arguments: Vec<String>,
        /// The file and the line that it begins in.
        place: Place,
        is_submenu: bool,
    },
    /// It is an entry of the Boot Loader Specification.
    Bls { volume: VolumeId, entry: Box<Entry> },
}

/// Where a command stands.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) path: Rc<str>,
    pub(super) line: usize,
}

/// A kernel that commands have named so far.
#[derive(Clone, Debug)]
pub(super) struct Loading {
    pub(super) kernel: FileRef,
    pub(super) initrds: Vec<FileRef>,
    pub(super) cmdline: String,
}

/// The state of GRUB.
pub(super) struct Run<'a> {
    pub(super) files: &'a Files<'a>,
    pub(super) variables: BTreeMap<String, String>,
    pub(super) functions: BTreeMap<String, Block>,
    /// The arguments of the function that is executed.
    pub(super) arguments: Vec<String>,
    pub(super) menu: Vec<MenuEntry>,
    pub(super) loading: Option<Loading>,
    /// Whether the last command succeeded.
    pub(super) is_ok: bool,
    /// Where execution is, for errors.
    pub(super) place: Place,
    /// The file system of the first file: where a search looks first.
    pub(super) home: VolumeId,
    pub(super) includes: usize,
    nesting: usize,
    commands_left: usize,
    bytes_left: usize,
}

impl<'a> Run<'a> {
    pub(super) fn new(files: &'a Files<'a>, home: VolumeId, path: &str) -> Self {
        let mut run = Self {
            files,
            variables: BTreeMap::new(),
            functions: BTreeMap::new(),
            arguments: Vec::new(),
            menu: Vec::new(),
            loading: None,
            is_ok: true,
            place: Place {
                path: path.into(),
                line: 1,
            },
            home,
            includes: 0,
            nesting: 0,
            commands_left: limits::COMMANDS,
            bytes_left: limits::EXPANDED_BYTES,
        };
        let root = files.volume(home).map(device).unwrap_or_default();
        let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
        let prefix = format!("({root})/{directory}");
        for (name, value) in [
            ("root", root.as_str()),
            ("prefix", &prefix),
            ("config_directory", &prefix),
            ("cmdpath", &prefix),
            ("grub_platform", "pc"),
            ("grub_cpu", "i386"),
            ("feature_menuentry_id", "y"),
            ("feature_menuentry_options", "y"),
            ("feature_timeout_style", "y"),
            ("feature_platform_search_hint", "y"),
            ("feature_default_font_path", "y"),
            ("feature_all_video_module", "y"),
            ("feature_nativedisk_cmd", "y"),
            ("feature_200_final", "y"),
        ] {
            run.variables.insert(name.to_owned(), value.to_owned());
        }
        run
    }

    /// An error at the place of execution.
    pub(super) fn error(&self, kind: GrubErrorKind) -> GrubError {
        GrubError {
            path: self.place.path.to_string(),
            line: self.place.line,
            kind,
        }
    }

    pub(super) fn set(&mut self, name: &str, value: String) -> Result<(), GrubError> {
        let is_new = !self.variables.contains_key(name);
        if is_new && self.variables.len() >= limits::VARIABLES {
            return Err(self.error(GrubErrorKind::Quota("2048 variables")));
        }
        if value.len() > limits::VALUE_BYTES || name.len() > limits::VALUE_BYTES {
            return Err(self.error(GrubErrorKind::Quota("65536 bytes of a variable")));
        }
        self.variables.insert(name.to_owned(), value);
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> &str {
        self.variables.get(name).map_or("", String::as_str)
    }

    /// Executes a file's commands in place.
    pub(super) fn file(&mut self, volume: VolumeId, path: &str) -> Result<Flow, GrubError> {
        let text = match self.files.read(volume, path) {
            Ok(Some(text)) => text,
            Ok(None) => {
                self.is_ok = false;
                return Ok(Flow::Next);
            }
            Err(error) => return Err(self.error(error.into())),
        };
        if self.includes >= limits::INCLUDES {
            let path = path.to_owned();
            return Err(self.error(GrubErrorKind::Includes { path }));
        }
        let name: Rc<str> = path.into();
        let block = script::parse(&text).map_err(|(line, kind)| GrubError {
            path: path.to_owned(),
            line,
            kind,
        })?;
        let outer = std::mem::replace(
            &mut self.place,
            Place {
                path: name,
                line: 1,
            },
        );
        self.includes += 1;
        let flow = self.block(&block)?;
        self.includes -= 1;
        self.place = outer;
        Ok(flow)
    }

    pub(super) fn block(&mut self, block: &[Command]) -> Result<Flow, GrubError> {
        if self.nesting >= limits::NESTING {
            return Err(self.error(GrubErrorKind::Nesting));
        }
        self.nesting += 1;
        let mut flow = Flow::Next;
        for command in block {
            self.place.line = command.line;
            flow = self.command(command)?;
            if flow != Flow::Next {
                break;
            }
        }
        self.nesting -= 1;
        Ok(flow)
    }

    fn command(&mut self, command: &Command) -> Result<Flow, GrubError> {
        let left = self.commands_left.checked_sub(1);
        let left = left.ok_or_else(|| self.error(GrubErrorKind::Quota("10000 commands")))?;
        self.commands_left = left;
        match &command.what {
            What::Simple { words, block } => self.simple(words, block.as_ref()),
            What::If { arms, otherwise } => {
                for (condition, body) in arms {
                    let flow = self.block(condition)?;
                    if flow != Flow::Next {
                        return Ok(flow);
                    }
                    if self.is_ok {
                        return self.block(body);
                    }
                }
                self.is_ok = true;
                self.block(otherwise)
            }
            What::Function { name, body } => {
                if self.functions.len() >= limits::VARIABLES {
                    return Err(self.error(GrubErrorKind::Quota("2048 functions")));
                }
                self.functions.insert(name.clone(), Rc::clone(body));
                Ok(Flow::Next)
            }
            What::Loop { keyword } => Err(self.error(GrubErrorKind::Loop(keyword.clone()))),
        }
    }

    fn simple(&mut self, words: &[Word], block: Option<&Block>) -> Result<Flow, GrubError> {
        let assigned = words.first().and_then(assignment);
        if let (Some((name, rest)), 1) = (assigned, words.len()) {
            let value = self.expand(&rest)?.join(" ");
            self.set(&name, value)?;
            self.is_ok = true;
            return Ok(Flow::Next);
        }
        let mut all = Vec::new();
        for word in words {
            all.extend(self.expand(word)?);
        }
        let Some((name, arguments)) = all.split_first() else {
            return match block {
                Some(block) => self.block(block),
                None => Ok(Flow::Next),
            };
        };
        if let Some(function) = self.functions.get(name).cloned() {
            return self.call(&function, arguments.to_vec());
        }
        match name.as_str() {
            "[" => {
                let inner = arguments
                    .strip_suffix(&["]".to_owned()])
                    .unwrap_or(arguments);
                self.is_ok = test(self, inner);
                Ok(Flow::Next)
            }
            "test" => {
                self.is_ok = test(self, arguments);
                Ok(Flow::Next)
            }
            "return" => {
                self.is_ok = arguments.first().is_none_or(|status| status == "0");
                Ok(Flow::Return)
            }
            name => commands::execute(self, name, arguments, block),
        }
    }

    /// Executes a function, or an entry, with its arguments.
    pub(super) fn call(
        &mut self,
        block: &Block,
        arguments: Vec<String>,
    ) -> Result<Flow, GrubError> {
        let outer = std::mem::replace(&mut self.arguments, arguments);
        self.is_ok = true;
        let flow = self.block(block)?;
        self.arguments = outer;
        Ok(match flow {
            Flow::Return => Flow::Next,
            other => other,
        })
    }

    /// Replaces a word's variables; an unquoted one makes as many words as it has.
    pub(super) fn expand(&mut self, word: &Word) -> Result<Vec<String>, GrubError> {
        let mut words = Vec::new();
        // `None`: no word was begun, and an empty variable begins none.
        let mut current: Option<String> = None;
        for part in &word.0 {
            match part {
                Part::Text { text, .. } => current.get_or_insert_default().push_str(text),
                Part::Variable { name, quoted: true } => {
                    let value = self.value(name);
                    current.get_or_insert_default().push_str(&value);
                }
                Part::Variable {
                    name,
                    quoted: false,
                } => {
                    let value = self.value(name);
                    let mut pieces = value.split_whitespace();
                    let Some(first) = pieces.next() else { continue };
                    if value.starts_with(char::is_whitespace) {
                        words.extend(current.take());
                    }
                    current.get_or_insert_default().push_str(first);
                    for piece in pieces {
                        words.extend(current.replace(piece.to_owned()));
                    }
                    if value.ends_with(char::is_whitespace) {
                        words.extend(current.take());
                    }
                }
            }
            let bytes = current.as_ref().map_or(0, String::len);
            let left = self.bytes_left.checked_sub(bytes);
            let left = left.ok_or_else(|| self.error(GrubErrorKind::Quota("8 MiB of words")))?;
            self.bytes_left = left;
        }
        words.extend(current);
        Ok(words)
    }

    fn value(&self, name: &str) -> String {
        match name {
            "?" => (if self.is_ok { "0" } else { "1" }).to_owned(),
            "#" => self.arguments.len().to_string(),
            "@" | "*" => self.arguments.join(" "),
            name => match name.parse::<usize>() {
                Ok(0) => String::new(),
                Ok(number) => self.arguments.get(number - 1).cloned().unwrap_or_default(),
                Err(_) => self.get(name).to_owned(),
            },
        }
    }

    /// Returns where a path of GRUB's leads: `(device)/path`, or `/path` on `$root`.
    pub(super) fn resolve(&self, path: &str) -> Result<(VolumeId, String), GrubErrorKind> {
        let (name, path) = match path.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            Some((device, path)) => (device, path),
            None => (self.get("root"), path),
        };
        let volume = self
            .files
            .volumes()
            .iter()
            .position(|volume| is_device(volume, name))
            .ok_or_else(|| GrubErrorKind::Device(name.to_owned()))?;
        Ok((VolumeId(volume), normalize(path)?))
    }

    /// Returns what a path leads to: nothing, something without a size, or a file with one.
    pub(super) fn size_of(&self, path: &str) -> Option<Option<u64>> {
        let (volume, path) = self.resolve(path).ok()?;
        let stat = self.files.stat(volume, &path).ok()??;
        Some((stat.kind == FileKind::Regular).then_some(stat.size))
    }
}

/// Splits `name=value` without expanding it.
fn assignment(word: &Word) -> Option<(String, Word)> {
    let Some(Part::Text {
        text,
        quoted: false,
    }) = word.0.first()
    else {
        return None;
    };
    let (name, value) = text.split_once('=')?;
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    if name.is_empty() || !name.chars().all(is_name) {
        return None;
    }
    let mut rest = word.clone();
    if let Some(first) = rest.0.first_mut() {
        *first = Part::Text {
            text: value.to_owned(),
            quoted: false,
        };
    }
    Some((name.to_owned(), rest))
}

/// A volume's device as GRUB calls it.
pub(super) fn device(volume: &Volume) -> String {
    match volume.partition {
        Some(partition) => format!("hd{},{partition}", volume.disk),
        None => format!("hd{}", volume.disk),
    }
}

/// Whether a name of GRUB's is that of a volume: `hd0`, `hd0,1`, `hd0,gpt1`, `hd0,msdos1`.
fn is_device(volume: &Volume, name: &str) -> bool {
    let (disk, partition) = match name.split_once(',') {
        Some((disk, partition)) => (disk, Some(partition)),
        None => (name, None),
    };
    let disk = disk
        .strip_prefix("hd")
        .and_then(|number| number.parse().ok());
    let partition = partition.map(|name| {
        let number = name.trim_start_matches(|letter: char| !letter.is_ascii_digit());
        number.parse::<u32>().ok()
    });
    disk == Some(volume.disk) && partition == volume.partition.map(Some)
}
