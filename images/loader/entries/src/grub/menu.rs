//! From a menu to the entry that starts without a key pressed.

use super::run::{Entered, Flow, MenuEntry, Run};
use super::{GrubError, GrubErrorKind};
use crate::files::Files;
use crate::volumes::VolumeId;
use crate::{BootEntry, FileRef, Format, limits};

pub(super) fn load(
    files: &Files<'_>,
    volume: VolumeId,
    path: &str,
) -> Result<BootEntry, GrubError> {
    let mut run = Run::new(files, volume, path);
    run.file(volume, path)?;
    let mut default = run.get("default").to_owned();
    let mut title = String::from("kernel of the configuration");
    for _ in 0..limits::INCLUDES {
        let menu = std::mem::take(&mut run.menu);
        // A configuration may start a kernel without a menu.
        if menu.is_empty() && run.loading.is_some() {
            return finish(&mut run, title, volume, path);
        }
        let Some((entry, rest)) = choose(&menu, &default) else {
            return Err(run.error(GrubErrorKind::NoEntry));
        };
        title.clone_from(&entry.title);
        run.set("chosen", title.clone())?;
        match &entry.what {
            Entered::Bls { volume, entry } => {
                let found = entry.resolve(run.files, *volume, &run.variables);
                return found.map_err(|error| run.error(error.into()));
            }
            Entered::Commands {
                block,
                arguments,
                place,
                is_submenu,
            } => {
                run.place = place.clone();
                run.loading = None;
                default = rest.unwrap_or_default().to_owned();
                let flow = run.call(block, arguments.clone())?;
                if *is_submenu || (flow == Flow::Stop && run.loading.is_none()) {
                    // `configfile` in an entry: another menu, which has its own default.
                    if !*is_submenu {
                        default = run.get("default").to_owned();
                    }
                    continue;
                }
                run.menu.clear();
                if run.loading.is_none() {
                    run.place = place.clone();
                    return Err(run.error(GrubErrorKind::NoKernel(title)));
                }
                return finish(&mut run, title, volume, path);
            }
        }
    }
    let path = run.place.path.to_string();
    Err(run.error(GrubErrorKind::Includes { path }))
}

fn finish(
    run: &mut Run<'_>,
    title: String,
    volume: VolumeId,
    path: &str,
) -> Result<BootEntry, GrubError> {
    let Some(loading) = run.loading.take() else {
        return Err(run.error(GrubErrorKind::NoKernel(title)));
    };
    Ok(BootEntry {
        title,
        format: Format::Grub,
        config: FileRef::whole(volume, path),
        kernel: loading.kernel,
        initrds: loading.initrds,
        cmdline: loading.cmdline,
    })
}

/// Returns the default entry and what `default` says about the menu below it. As in GRUB, a default
/// that is not there is the first one.
fn choose<'m, 'd>(
    menu: &'m [MenuEntry],
    default: &'d str,
) -> Option<(&'m MenuEntry, Option<&'d str>)> {
    let named = |name: &str| {
        let is_it = |entry: &&MenuEntry| entry.id.as_deref() == Some(name) || entry.title == name;
        menu.iter()
            .find(is_it)
            .or_else(|| menu.get(name.trim().parse::<usize>().ok()?))
    };
    if let Some(entry) = named(default) {
        return Some((entry, None));
    }
    let (name, rest) = default.split_once('>').unwrap_or((default, ""));
    let entry = named(name).or_else(|| menu.first())?;
    Some((entry, (!rest.is_empty()).then_some(rest)))
}
