//! GRUB's commands.

use super::run::{Entered, Flow, Loading, MenuEntry, Run, device};
use super::script::Block;
use super::{GrubError, GrubErrorKind};
use crate::volumes::VolumeId;
use crate::{FileRef, bls, grub_env, limits, uki};

/// Commands without a meaning here, which succeed.
const IGNORED: &[&str] = &[
    ":",
    "background_color",
    "background_image",
    "clear",
    "echo",
    "export",
    "gfxmode_set",
    "insmod",
    "keymap",
    "loadfont_set",
    "play",
    "rmmod",
    "save_env",
    "serial",
    "set_background",
    "sleep",
    "terminal_input",
    "terminal_output",
    "terminfo",
    "true",
    "nativedisk",
    "videoinfo",
    "gettext",
    "badram",
    "cutmem",
    "lsmod",
    "tpm",
    "password",
    "password_pbkdf2",
    "export_env",
    "bls_import",
    "smbios",
    "efi-watchdog",
    "boot_hidden",
    "setparams",
];

/// Commands that fail here: what they ask about is not there.
const FAILING: &[&str] = &[
    "background",
    "false",
    "fwsetup",
    "hwmatch",
    "keystatus",
    "loadfont",
    "lsefi",
    "authenticate",
    "cpuid",
    "linux_gfx",
    "ntldr_exists",
    "usb_keyboard",
    "read",
];

/// Executes a command that is no function.
pub(super) fn execute(
    run: &mut Run<'_>,
    name: &str,
    arguments: &[String],
    block: Option<&Block>,
) -> Result<Flow, GrubError> {
    run.is_ok = true;
    match name {
        "set" => set(run, arguments)?,
        "unset" => {
            for name in arguments {
                run.variables.remove(name);
            }
        }
        "load_env" => load_env(run, arguments)?,
        "search" | "search.fs_uuid" | "search.fs_label" | "search.file" => {
            search(run, name, arguments)?;
        }
        "source" | "." => return source(run, name, arguments),
        "configfile" | "normal" | "normal_exit" => return configfile(run, name, arguments),
        "menuentry" | "submenu" => menu_entry(run, name, arguments, block)?,
        "linux" | "linux16" | "linuxefi" => linux(run, name, arguments)?,
        "initrd" | "initrd16" | "initrdefi" => initrd(run, name, arguments)?,
        "chainloader" => chainloader(run, name, arguments)?,
        "boot" if run.loading.is_some() => return Ok(Flow::Stop),
        "blscfg" => blscfg(run)?,
        "increment" => add(run, arguments, 1)?,
        "decrement" => add(run, arguments, -1)?,
        name if IGNORED.contains(&name) => {}
        name if FAILING.contains(&name) => run.is_ok = false,
        name => return Err(run.error(GrubErrorKind::Command(name.to_owned()))),
    }
    Ok(Flow::Next)
}

fn set(run: &mut Run<'_>, arguments: &[String]) -> Result<(), GrubError> {
    for argument in arguments {
        if let Some((name, value)) = argument.split_once('=') {
            run.set(name, value.to_owned())?;
        }
    }
    Ok(())
}

fn add(run: &mut Run<'_>, arguments: &[String], change: i64) -> Result<(), GrubError> {
    for name in arguments {
        let number: i64 = run.get(name).parse().unwrap_or(0);
        run.set(name, number.saturating_add(change).to_string())?;
    }
    Ok(())
}

/// `load_env [--file FILE] [NAME...]`: all variables of the environment block, or those named.
fn load_env(run: &mut Run<'_>, arguments: &[String]) -> Result<(), GrubError> {
    let mut path = format!("{}/grubenv", run.get("prefix"));
    let mut wanted: Vec<&str> = Vec::new();
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "-f" | "--file" => match words.next() {
                Some(file) => path.clone_from(file),
                None => return Err(run.error(GrubErrorKind::Operand("load_env".to_owned()))),
            },
            "-s" | "--skip-sig" => {}
            word => match word.strip_prefix("--file=") {
                Some(file) => path = file.to_owned(),
                None => wanted.push(word),
            },
        }
    }
    let text = run
        .resolve(&path)
        .and_then(|(volume, path)| Ok(run.files.read(volume, &path)?));
    // GRUB goes on without the block.
    let Ok(Some(text)) = text else {
        run.is_ok = false;
        return Ok(());
    };
    for (name, value) in grub_env::parse(&text) {
        if wanted.is_empty() || wanted.contains(&name.as_str()) {
            run.set(&name, value)?;
        }
    }
    Ok(())
}

/// What `search` compares.
#[derive(Clone, Copy)]
enum Key {
    Uuid,
    Label,
    File,
}

/// `search [--set[[=]NAME]] [--no-floppy] [--hint…] --fs-uuid|--label|--file WHAT`, and the forms
/// `search.fs_uuid WHAT NAME HINT`.
fn search(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<(), GrubError> {
    let mut operands: Vec<&str> = Vec::new();
    let mut variable = None;
    let mut is_apart = false;
    let mut key = match name {
        "search.fs_uuid" => Key::Uuid,
        "search.fs_label" => Key::Label,
        _ => Key::File,
    };
    let mut words = arguments.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        match word {
            "-u" | "--fs-uuid" => key = Key::Uuid,
            "-l" | "--label" | "--fs-label" => key = Key::Label,
            "-f" | "--file" => key = Key::File,
            "-s" | "--set" => {
                let name = words.next_if(|word| !word.starts_with('-'));
                variable = Some(name.unwrap_or("root"));
                is_apart = name.is_some();
            }
            "-n" | "--no-floppy" | "--root-dev-only" | "--efidisk-only" | "--cryptodisk-only" => {}
            word => match word.strip_prefix("--set=") {
                Some(name) => variable = Some(name),
                None if word.starts_with("--hint") || word.starts_with("-h") => {}
                None => operands.push(word),
            },
        }
    }
    if operands.is_empty() && is_apart {
        // An older GRUB's `search --set WHAT`.
        operands.extend(variable.replace("root"));
    }
    let Some(what) = operands.first() else {
        return Err(run.error(GrubErrorKind::Operand(name.to_owned())));
    };
    if name != "search" {
        variable = Some(operands.get(1).copied().unwrap_or("root"));
    }
    let found = find(run, key, what);
    run.is_ok = found.is_some();
    if let (Some(found), Some(variable)) = (found, variable)
        && let Some(volume) = run.files.volume(found)
    {
        run.set(variable, device(volume))?;
    }
    Ok(())
}

/// Finds a volume: on the disk of the first file before others, as disks may be copies.
fn find(run: &Run<'_>, key: Key, what: &str) -> Option<VolumeId> {
    let volumes = run.files.volumes();
    let matches = |number: usize| {
        volumes.get(number).is_some_and(|volume| match key {
            Key::Uuid => {
                let uuid = volume.uuid.as_deref();
                uuid.is_some_and(|uuid| uuid.eq_ignore_ascii_case(what))
            }
            Key::Label => volume.label.as_deref() == Some(what),
            Key::File => {
                let path = crate::normalize(what).unwrap_or_default();
                let stat = run.files.stat(VolumeId(number), &path);
                !path.is_empty() && matches!(stat, Ok(Some(_)))
            }
        })
    };
    let home = run.files.volume(run.home).map(|volume| volume.disk);
    let is_home = |number: &usize| volumes.get(*number).map(|volume| volume.disk) == home;
    let all = 0..volumes.len();
    let found = all.clone().filter(is_home).find(|number| matches(*number));
    found
        .or_else(|| all.clone().find(|number| matches(*number)))
        .map(VolumeId)
}

fn source(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<Flow, GrubError> {
    let Some(path) = arguments.first() else {
        return Err(run.error(GrubErrorKind::Operand(name.to_owned())));
    };
    match run.resolve(path) {
        Ok((volume, path)) => Ok(match run.file(volume, &path)? {
            Flow::Return => Flow::Next,
            other => other,
        }),
        Err(GrubErrorKind::Device(_)) => {
            run.is_ok = false;
            Ok(Flow::Next)
        }
        Err(kind) => Err(run.error(kind)),
    }
}

/// Shows another file's menu instead of this one; when there is no such file, this one goes on.
fn configfile(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<Flow, GrubError> {
    let Some(path) = arguments.first() else {
        return match name {
            // The configuration that is executed already.
            "normal" | "normal_exit" => Ok(Flow::Next),
            name => Err(run.error(GrubErrorKind::Operand(name.to_owned()))),
        };
    };
    let (volume, path) = match run.resolve(path) {
        Ok(found) => found,
        Err(GrubErrorKind::Device(_)) => {
            run.is_ok = false;
            return Ok(Flow::Next);
        }
        Err(kind) => return Err(run.error(kind)),
    };
    if !run.files.is_file(volume, &path) {
        run.is_ok = false;
        return Ok(Flow::Next);
    }
    // A menu has its own entries, and its own way to choose among them.
    run.menu.clear();
    run.variables.remove("default");
    let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
    let root = run.files.volume(volume).map(device).unwrap_or_default();
    run.set("config_directory", format!("({root})/{directory}"))?;
    run.file(volume, &path)?;
    Ok(Flow::Stop)
}

fn menu_entry(
    run: &mut Run<'_>,
    name: &str,
    arguments: &[String],
    block: Option<&Block>,
) -> Result<(), GrubError> {
    let mut operands = Vec::new();
    let mut id = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--class" | "--users" | "--hotkey" => drop(words.next()),
            "--id" => id = words.next().cloned(),
            word if word.starts_with("--") => {
                if let Some(value) = word.strip_prefix("--id=") {
                    id = Some(value.to_owned());
                }
            }
            _ => operands.push(word.clone()),
        }
    }
    let (Some(title), Some(block)) = (operands.first(), block) else {
        return Err(run.error(GrubErrorKind::Operand(name.to_owned())));
    };
    let entry = MenuEntry {
        title: title.clone(),
        id,
        what: Entered::Commands {
            block: block.clone(),
            arguments: operands.clone(),
            place: run.place.clone(),
            is_submenu: name == "submenu",
        },
    };
    push(run, entry)
}

fn push(run: &mut Run<'_>, entry: MenuEntry) -> Result<(), GrubError> {
    if run.menu.len() >= limits::ENTRIES {
        return Err(run.error(GrubErrorKind::Quota("4096 menu entries")));
    }
    run.menu.push(entry);
    Ok(())
}

fn linux(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<(), GrubError> {
    let Some((path, parameters)) = arguments.split_first() else {
        return Err(run.error(GrubErrorKind::Operand(name.to_owned())));
    };
    let (volume, path) = run.resolve(path).map_err(|kind| run.error(kind))?;
    // As GRUB does: a parameter with blanks is quoted.
    let quoted = |parameter: &String| {
        if parameter.contains(' ') {
            format!("\"{parameter}\"")
        } else {
            parameter.clone()
        }
    };
    let parameters: Vec<String> = parameters.iter().map(quoted).collect();
    run.loading = Some(Loading {
        kernel: FileRef::whole(volume, path),
        initrds: Vec::new(),
        cmdline: parameters.join(" "),
    });
    Ok(())
}

fn initrd(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<(), GrubError> {
    let mut initrds = Vec::new();
    for path in arguments {
        let (volume, path) = run.resolve(path).map_err(|kind| run.error(kind))?;
        initrds.push(FileRef::whole(volume, path));
    }
    if initrds.len() > limits::INITRDS {
        return Err(run.error(GrubErrorKind::Quota("32 initial file systems")));
    }
    match &mut run.loading {
        Some(loading) => {
            loading.initrds = initrds;
            Ok(())
        }
        None => Err(run.error(GrubErrorKind::NoKernel(name.to_owned()))),
    }
}

/// Another loader cannot run, but a unified kernel image is a kernel.
fn chainloader(run: &mut Run<'_>, name: &str, arguments: &[String]) -> Result<(), GrubError> {
    let path = arguments.iter().find(|word| !word.starts_with("--"));
    let Some(path) = path else {
        return Err(run.error(GrubErrorKind::Operand(name.to_owned())));
    };
    let chainloader = GrubErrorKind::Chainloader(path.clone());
    let found = run.resolve(path).map_err(|kind| run.error(kind));
    match found {
        Ok((volume, path)) if run.files.is_file(volume, &path) => {
            let entry = match uki::load(run.files, volume, &path) {
                Ok(entry) => entry,
                Err(uki::UkiError::NotUnified { .. }) => return Err(run.error(chainloader)),
                Err(error) => return Err(run.error(error.into())),
            };
            run.loading = Some(Loading {
                kernel: entry.kernel,
                initrds: entry.initrds,
                cmdline: entry.cmdline,
            });
            Ok(())
        }
        _ => Err(run.error(chainloader)),
    }
}

/// Fedora's: the entries of the Boot Loader Specification become the menu's, newest first.
fn blscfg(run: &mut Run<'_>) -> Result<(), GrubError> {
    let device = match run.get("boot") {
        "" => run.get("root"),
        boot => boot,
    };
    let (volume, _) = run
        .resolve(&format!("({device})/"))
        .map_err(|kind| run.error(kind))?;
    let mut found = Vec::new();
    for directory in bls::DIRECTORIES {
        let entries =
            bls::entries(run.files, volume, directory).map_err(|error| run.error(error.into()))?;
        found.extend(entries);
    }
    for entry in found {
        let title = entry.title.clone().unwrap_or_else(|| entry.id.clone());
        push(
            run,
            MenuEntry {
                title,
                id: Some(entry.id.clone()),
                what: Entered::Bls {
                    volume,
                    entry: Box::new(entry),
                },
            },
        )?;
    }
    Ok(())
}
