//! The structure of the sources: the rooms of a directory, which are its files and directories,
//! import each other in no circle. They can then be laid on floors, where each room imports only
//! what is below it.

mod imports;
mod known;
mod source;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use imports::Imports;
use known::{HONEST_CIRCLES, WITH_OWN_FILE};

/// The name of the room that is a module's own file.
const OWN_FILE: &str = "mod";

/// The rooms that each room imports, each with a file that does so and a name that it takes.
type Rooms = BTreeMap<String, BTreeMap<String, String>>;

#[test]
fn rooms_import_each_other_in_no_circle() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let honest: BTreeMap<&str, &str> = HONEST_CIRCLES.into_iter().collect();
    let listed = WITH_OWN_FILE.iter().chain(honest.keys());
    let mut known: BTreeSet<&str> = listed.copied().collect();
    let mut wrong = Vec::new();
    for (directory, why) in &honest {
        println!("{directory} keeps its circle: {why}");
    }
    for root in sources(top) {
        let imports = Imports::of(&top.join(&root));
        for module in modules(&top.join(&root)) {
            let directory = [root.as_str(), &module.join("/")].join("/");
            let directory = directory.trim_end_matches('/');
            let rooms = rooms(&imports, &module);
            let others = without_own_file(&rooms);
            let is_known = known.remove(directory);
            let checked = match (honest.contains_key(directory), is_known) {
                (true, _) if circle(&others).is_none() => {
                    wrong.push(format!(
                        "{directory}: no circle is left: strike it from HONEST_CIRCLES"
                    ));
                    continue;
                }
                (true, _) => continue,
                (false, true) if circle(&rooms).is_none() => {
                    wrong.push(format!("{directory}: strike it from WITH_OWN_FILE"));
                    continue;
                }
                (false, true) => others,
                (false, false) => rooms,
            };
            if let Some(circle) = circle(&checked) {
                wrong.push(format!("{directory}:\n{circle}"));
            }
        }
    }
    wrong.extend(
        known
            .iter()
            .map(|one| format!("{one}: there is no such directory")),
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found_and_told_by_its_imports() {
    let files = [
        ("lib.rs", "mod a; mod b; mod c; pub use c::Thing;"),
        (
            "a.rs",
            "use crate::b::{self, B as Other}; fn f() -> &'static str { \"crate::c\" }",
        ),
        ("b/mod.rs", "mod deep; // crate::a::A"),
        ("b/deep.rs", "fn f() { let _ = (\'\"\', crate::Thing); }"),
        (
            "c.rs",
            "pub(in crate::a) struct Thing;\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n}",
        ),
    ];
    let without = Imports::of_files(files);
    assert_eq!(circle(&rooms(&without, &[])), None);
    let with = files.map(|(path, text)| match path {
        "c.rs" => (path, "use super::a::A;\npub struct Thing;"),
        _ => (path, text),
    });
    let found = circle(&rooms(&Imports::of_files(with), &[])).unwrap();
    for line in [
        "a -> b: a.rs takes ",
        "b -> c: b/deep.rs takes Thing",
        "c -> a: c.rs takes A",
    ] {
        assert!(found.contains(line), "{found}");
    }
}

/// Returns the imports between the rooms of a module. Its own file is one of them.
fn rooms(imports: &Imports, module: &[String]) -> Rooms {
    let room = |path: &[String]| -> Option<String> {
        let rest = path.strip_prefix(module)?;
        Some(rest.first().map_or(OWN_FILE, String::as_str).to_owned())
    };
    let mut rooms = Rooms::new();
    for import in imports.iter() {
        let (Some(from), Some(to)) = (room(&import.from), room(&import.to)) else {
            continue;
        };
        if from != to {
            let taken = format!("{} takes {}", import.file, import.name);
            rooms.entry(from).or_default().entry(to).or_insert(taken);
        }
    }
    rooms
}

/// Returns the rooms without the module's own file.
fn without_own_file(rooms: &Rooms) -> Rooms {
    let mut rooms = rooms.clone();
    rooms.remove(OWN_FILE);
    for imported in rooms.values_mut() {
        imported.remove(OWN_FILE);
    }
    rooms
}

/// Returns the source directories of the crates, from the top of the checkout.
fn sources(top: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![top.to_owned()];
    while let Some(directory) = left.pop() {
        let is_crate = directory.join("Cargo.toml").exists();
        for (name, path) in directories(&directory) {
            match name.as_str() {
                "src" if is_crate => {
                    found.push(path.strip_prefix(top).unwrap().to_str().unwrap().to_owned());
                }
                "target" => {}
                name if name.starts_with('.') => {}
                _ => left.push(path),
            }
        }
    }
    assert!(found.len() > 10, "{found:?}");
    found
}

/// Returns the modules of a crate that are directories: its source directory itself, and those in
/// it, without those of tests.
fn modules(root: &Path) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    let mut left = vec![(Vec::new(), root.to_owned())];
    while let Some((module, directory)) = left.pop() {
        for (name, path) in directories(&directory) {
            if !["tests", "testing"].contains(&name.as_str()) {
                let mut inner = module.clone();
                inner.push(name);
                left.push((inner, path));
            }
        }
        found.push(module);
    }
    found
}

fn directories(within: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs::read_dir(within).unwrap().map(Result::unwrap);
    let entries = entries.filter(|entry| entry.file_type().unwrap().is_dir());
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    named.collect()
}

/// Returns the imports of a shortest circle, if there is a circle.
fn circle(rooms: &Rooms) -> Option<String> {
    let circles = rooms.keys().filter_map(|room| path(rooms, room, room));
    let shortest = circles.min_by_key(Vec::len)?;
    let lines = shortest.iter().map(|(from, to)| {
        let taken = &rooms[from][to];
        format!("  {from} -> {to}: {taken}\n")
    });
    Some(lines.collect())
}

/// Returns a shortest path of at least one import.
fn path(rooms: &Rooms, from: &str, to: &str) -> Option<Vec<(String, String)>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut next = VecDeque::from([from]);
    while let Some(room) = next.pop_front() {
        for imported in rooms.get(room).into_iter().flat_map(BTreeMap::keys) {
            if before.contains_key(imported.as_str()) {
                continue;
            }
            before.insert(imported, room);
            next.push_back(imported);
        }
    }
    let mut path = Vec::new();
    let mut end = to;
    loop {
        let start = *before.get(end)?;
        path.push((start.to_owned(), end.to_owned()));
        end = start;
        if end == from {
            path.reverse();
            return Some(path);
        }
    }
}
