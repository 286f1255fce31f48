//! Removes templates: the oldest of too many, and incomplete ones.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{io, process};

use podvisor_host::removal::remove_tree;
use tracing::{debug, warn};

use super::{STATE, has_just_failed};
use crate::machine::Snapshot;

/// Most templates that are kept: each takes some 30 MB of disk.
const MAX_TEMPLATES: usize = 16;

/// A template that was used more recently is not removed for another one: where machines have more
/// shapes than there is room for, each would cost the next one its template.
const IN_USE: Duration = Duration::from_secs(600);

/// Removes the leftovers of processes that were killed while they created templates. Those that are
/// being created stay.
pub fn remove_abandoned_templates(templates: &Path) {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(templates).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let failed = name.strip_suffix(".failed").map(|of| templates.join(of));
        if failed.is_some_and(|place| !has_just_failed(&place))
            && let Err(error) = fs::remove_file(entry.path())
        {
            debug!(%error, "a template's mark of failure stays");
        }
        // `.NAME.SOMETHING` while it is created, `NAME.lock` and `NAME.share` next to it.
        let of = match name.strip_prefix('.') {
            Some(partial) => partial.split('.').next(),
            None => name
                .strip_suffix(".lock")
                .or_else(|| name.strip_suffix(".share")),
        };
        names.extend(of.filter(|of| !of.is_empty()).map(|of| templates.join(of)));
    }
    for place in names {
        let lock_path = place.with_extension("lock");
        let lock = File::options().write(true).open(&lock_path);
        if lock.is_ok_and(|lock| matches!(lock.try_lock(), Err(TryLockError::WouldBlock))) {
            continue;
        }
        Snapshot::remove_partial(&place, None);
        for removed in [
            remove_tree(&place.with_extension("share")),
            fs::remove_file(lock_path),
        ] {
            if let Err(error) = removed
                && error.kind() != io::ErrorKind::NotFound
            {
                warn!(
                    %error,
                    template = %place.display(),
                    "failed to remove an incomplete template"
                );
            }
        }
    }
}

/// Removes a template. A process that is killed meanwhile leaves one that is whole, or a leftover
/// that [`remove_abandoned_templates`] removes.
pub(super) fn remove(place: &Path) -> io::Result<()> {
    let mut hidden = OsString::from(".");
    hidden.push(place.file_name().unwrap_or_default());
    hidden.push(format!(".{}.removed.partial", process::id()));
    let hidden = place.with_file_name(hidden);
    fs::rename(place, &hidden)?;
    fs::remove_dir_all(hidden)
}

/// Returns the templates, and when each was wanted last if that is known.
fn all(templates: &Path, now: SystemTime) -> Vec<(Option<SystemTime>, PathBuf)> {
    let entries = fs::read_dir(templates).into_iter().flatten().flatten();
    let templates = entries
        .filter(|entry| entry.path().join(STATE).exists() && entry.path().extension().is_none());
    let wanted = templates.filter_map(|entry| {
        let modified = entry.metadata().ok()?.modified().ok()?;
        // A clock that was ahead has set a time to come, which tells nothing.
        Some((Some(modified).filter(|at| *at <= now), entry.path()))
    });
    wanted.collect()
}

/// Returns whether there is room for one more template, or one that it may replace.
pub(super) fn has_room(templates: &Path) -> bool {
    let now = SystemTime::now();
    let all = all(templates, now);
    let is_in_use = |wanted: SystemTime| now.duration_since(wanted).is_ok_and(|age| age < IN_USE);
    let in_use = all
        .iter()
        .filter(|(wanted, _)| wanted.is_some_and(is_in_use));
    in_use.count() < MAX_TEMPLATES
}

/// Leaves the templates that were wanted last, and `made`, which was just made.
pub(super) fn remove_oldest(templates: &Path, made: &Path) {
    let mut all = all(templates, SystemTime::now());
    all.sort_by_key(|(wanted, path)| (path == made, *wanted));
    all.reverse();
    for (_, path) in all.split_off(MAX_TEMPLATES.min(all.len())) {
        if let Err(error) = remove(&path) {
            warn!(%error, template = %path.display(), "failed to remove an old template");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_templates_go_unless_somebody_makes_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in [
            ".dead.1.0.partial",
            ".made.2.0.partial",
            "dead.share",
            "whole",
        ] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join(STATE), "").unwrap();
        }
        File::create(path("dead.lock")).unwrap();
        let lock = File::create(path("made.lock")).unwrap();
        lock.try_lock().unwrap();
        remove_abandoned_templates(dir.path());
        let entries = fs::read_dir(dir.path()).unwrap().flatten();
        let mut left: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        left.sort();
        assert_eq!(left, [".made.2.0.partial", "made.lock", "whole"]);
    }

    #[test]
    fn a_template_is_there_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::create_dir(path("gone")).unwrap();
        fs::write(path("gone").join(STATE), "").unwrap();
        remove(&path("gone")).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
        // What cannot be removed no longer has the template's name, and goes the next time.
        fs::write(path("file"), "").unwrap();
        remove(&path("file")).unwrap_err();
        assert!(!path("file").exists());
        fs::create_dir(path(".half.1.removed.partial")).unwrap();
        remove_abandoned_templates(dir.path());
        let entries = fs::read_dir(dir.path()).unwrap().flatten();
        let left: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }

    #[test]
    fn a_template_from_the_future_goes_first_and_the_new_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let now = SystemTime::now();
        let hour = std::time::Duration::from_secs(3600);
        let add = |name: &str, at: SystemTime| {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join(STATE), "").unwrap();
            File::open(path(name)).unwrap().set_modified(at).unwrap();
        };
        add("old", now - hour);
        for n in 0..MAX_TEMPLATES {
            add(&n.to_string(), now + hour);
        }
        // By a clock that was set back further than that of the last use.
        add("made", now - 2 * hour);
        remove_oldest(dir.path(), &path("made"));
        assert!(path("made").exists() && path("old").exists());
        let entries = fs::read_dir(dir.path()).unwrap();
        assert_eq!(entries.count(), MAX_TEMPLATES);
    }

    #[test]
    fn the_templates_that_were_wanted_last_stay() {
        let dir = tempfile::tempdir().unwrap();
        let day = |n: u64| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(n * 86400);
        for n in 0..MAX_TEMPLATES as u64 + 3 {
            let path = dir.path().join(n.to_string());
            fs::create_dir(&path).unwrap();
            fs::write(path.join(STATE), "").unwrap();
            File::open(&path).unwrap().set_modified(day(n)).unwrap();
        }
        fs::create_dir(dir.path().join("something else")).unwrap();
        remove_oldest(dir.path(), Path::new("/none"));
        let left = |n: usize| dir.path().join(n.to_string()).exists();
        assert!((0..3).all(|n| !left(n)) && (3..MAX_TEMPLATES + 3).all(left));
        assert!(dir.path().join("something else").exists());
    }

    #[test]
    fn a_template_that_is_in_use_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let add = |n: usize, age: Duration| {
            let path = dir.path().join(n.to_string());
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join(STATE), "").unwrap();
            let wanted = SystemTime::now() - age;
            File::open(&path).unwrap().set_modified(wanted).unwrap();
        };
        assert!(has_room(&dir.path().join("none")));
        for n in 0..MAX_TEMPLATES {
            assert!(has_room(dir.path()), "{n}");
            add(n, Duration::from_secs(10));
        }
        assert!(!has_room(dir.path()));
        add(3, 2 * IN_USE);
        assert!(has_room(dir.path()));
    }

    #[test]
    fn a_mark_of_failure_goes_when_it_means_nothing_any_more() {
        let dir = tempfile::tempdir().unwrap();
        let [new, old] = ["new.failed", "old.failed"].map(|name| dir.path().join(name));
        File::create(&new).unwrap();
        let long_ago = SystemTime::now() - Duration::from_secs(7 * 86400);
        File::create(&old).unwrap().set_modified(long_ago).unwrap();
        remove_abandoned_templates(dir.path());
        assert!(new.exists() && !old.exists());
    }
}
