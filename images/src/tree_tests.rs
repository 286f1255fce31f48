use proptest::prelude::*;

use super::*;

fn path(text: &str) -> Vec<&[u8]> {
    text.split('/')
        .filter(|name| !name.is_empty())
        .map(str::as_bytes)
        .collect()
}

fn file(mark: u32) -> Leaf {
    Leaf::File(Content {
        size: 1,
        extent: Some(Extent {
            start: mark,
            blocks: 1,
        }),
        tail: Box::default(),
    })
}

struct Sketch(Tree);

impl Sketch {
    fn new() -> Self {
        Self(Tree::new())
    }
    fn file(&mut self, at: &str, mark: u32) -> &mut Self {
        self.0
            .put_leaf(&path(at), Meta::default(), file(mark))
            .unwrap();
        self
    }
    fn layer(&mut self) -> &mut Self {
        self.0.begin_layer();
        self
    }
    /// All paths, directories with a slash, in order.
    fn list(&self) -> String {
        fn walk(tree: &Tree, dir: NodeId, prefix: &str, out: &mut Vec<String>) {
            for (name, entry) in tree.children(dir).unwrap() {
                let name = format!("{prefix}{}", String::from_utf8_lossy(name));
                if tree.children(entry.node).is_some() {
                    out.push(format!("{name}/"));
                    walk(tree, entry.node, &format!("{name}/"), out);
                } else {
                    out.push(name);
                }
            }
        }
        let mut out = Vec::new();
        walk(&self.0, Tree::ROOT, "", &mut out);
        out.join(" ")
    }
    fn freed(&mut self) -> Vec<u32> {
        let mut marks: Vec<_> = self
            .0
            .take_freed()
            .iter()
            .filter_map(|content| Some(content.extent?.start))
            .collect();
        marks.sort_unstable();
        marks
    }
}

#[test]
fn a_whiteout_hides_a_subtree_of_lower_layers_and_frees_it() {
    let mut s = Sketch::new();
    s.file("a/b/c", 1).file("a/b/d", 2).file("a/e", 3).layer();
    s.0.whiteout(&path("a/b"));
    assert_eq!(s.list(), "a/ a/e");
    assert_eq!(s.freed(), [1, 2]);
}

#[test]
fn a_whiteout_spares_its_own_layer_in_either_order() {
    for whiteout_first in [true, false] {
        let mut s = Sketch::new();
        s.file("a/old", 1).layer();
        if whiteout_first {
            s.0.whiteout(&path("a"));
        }
        s.file("a/new", 2);
        if !whiteout_first {
            s.0.whiteout(&path("a"));
        }
        assert_eq!(s.list(), "a/ a/new");
        assert_eq!(s.freed(), [1]);
    }
}

#[test]
fn an_opaque_directory_hides_what_is_below_it_only() {
    let mut s = Sketch::new();
    s.file("a/old/x", 1).file("a/both", 2).file("b", 3).layer();
    s.file("a/both", 4).file("a/sub/new", 5);
    s.0.opaque(&path("a"));
    assert_eq!(s.list(), "a/ a/both a/sub/ a/sub/new b");
    assert_eq!(s.freed(), [1, 2]);
}

#[test]
fn whiteouts_of_nothing_do_nothing() {
    let mut s = Sketch::new();
    s.file("a", 1).layer();
    for gone in ["b", "a/b", "x/y/z", ""] {
        s.0.whiteout(&path(gone));
        s.0.opaque(&path("nowhere"));
    }
    assert_eq!(s.list(), "a");
}

#[test]
fn a_hard_link_outlives_its_target_across_layers() {
    let mut s = Sketch::new();
    s.file("a", 1).layer();
    s.0.put_link(&path("b"), &path("a")).unwrap();
    assert_eq!(s.0.find(&path("a")), s.0.find(&path("b")));
    s.layer();
    s.0.whiteout(&path("a"));
    assert_eq!(s.list(), "b");
    assert!(s.freed().is_empty());
    s.file("b", 2);
    assert_eq!(s.freed(), [1]);
}

#[test]
fn a_link_to_itself_changes_nothing() {
    let mut s = Sketch::new();
    s.file("a", 1);
    s.0.put_link(&path("a"), &path("a")).unwrap();
    assert_eq!(s.list(), "a");
    assert_eq!(s.0.node(s.0.find(&path("a")).unwrap()).links, 1);
    assert!(s.freed().is_empty());
}

#[test]
fn links_to_directories_and_to_nothing_are_refused() {
    let mut s = Sketch::new();
    s.file("d/f", 1);
    assert_eq!(
        s.0.put_link(&path("x"), &path("d")),
        Err(TreeError::LinkToDirectory("d".into()))
    );
    assert_eq!(
        s.0.put_link(&path("x"), &path("")),
        Err(TreeError::LinkToDirectory("".into()))
    );
    assert_eq!(
        s.0.put_link(&path("x"), &path("n/o")),
        Err(TreeError::LinkTargetMissing("n/o".into()))
    );
    assert_eq!(s.list(), "d/ d/f");
}

#[test]
fn a_hard_link_below_its_own_target_is_refused() {
    for (second_name, link) in [(None, "a/b"), (None, "a/b/c"), (Some("z"), "a/b")] {
        let mut s = Sketch::new();
        s.file("a", 1);
        if let Some(name) = second_name {
            s.0.put_link(&path(name), &path("a")).unwrap();
        }
        s.layer();
        // The parents of the new name hide what it should be another name of.
        assert_eq!(
            s.0.put_link(&path(link), &path("a")),
            Err(TreeError::LinkToDirectory("a".into())),
            "{link}"
        );
        let kept = second_name.is_some();
        assert_eq!(s.freed().is_empty(), kept, "{link}");
        assert_eq!(s.list().ends_with(" z"), kept, "{link}");
    }
}

#[test]
fn a_hard_link_below_a_hidden_name_of_its_target_has_the_other_name_s_content() {
    let mut s = Sketch::new();
    s.file("a", 1);
    s.0.put_link(&path("z"), &path("a")).unwrap();
    s.layer();
    s.0.put_link(&path("a/b"), &path("z")).unwrap();
    assert_eq!(s.list(), "a/ a/b z");
    assert_eq!(s.0.find(&path("a/b")), s.0.find(&path("z")));
    assert_eq!(s.0.node(s.0.find(&path("z")).unwrap()).links, 2);
    assert!(s.freed().is_empty());
}

fn link(s: &mut Sketch, at: &str, target: &str) {
    let leaf = Leaf::Symlink(target.as_bytes().into());
    s.0.put_leaf(&path(at), Meta::default(), leaf).unwrap();
}

#[test]
fn nothing_is_put_below_a_file_of_the_same_layer() {
    let mut s = Sketch::new();
    s.file("f", 1);
    link(&mut s, "l", "f");
    for at in ["f/x", "l/x"] {
        let refused = s.0.put_leaf(&path(at), Meta::default(), file(7));
        assert_eq!(refused, Err(TreeError::ParentNotDirectory("f".into())));
        assert_eq!(s.freed(), [7]);
    }
    let refused = s.0.put_dir(&path("l/sub"), Meta::default());
    assert_eq!(refused, Err(TreeError::ParentNotDirectory("f".into())));
    assert_eq!(s.list(), "f l");
}

#[test]
fn an_entry_below_a_link_of_its_layer_goes_to_where_the_link_leads() {
    for (target, found) in [
        ("usr/lib", "usr/lib/"),
        ("/usr/./lib/", "usr/lib/"),
        ("../../../usr/lib", "usr/lib/"),
        ("usr/../opt/none/../lib", "opt/lib/"),
        ("/", ""),
        ("..", ""),
    ] {
        let mut s = Sketch::new();
        link(&mut s, "lib", target);
        s.file("lib/x.so", 1).file("lib/deep/y.so", 2);
        s.0.put_dir(&path("lib/sub"), Meta::default()).unwrap();
        let at = |name: &str| s.0.find(&path(&format!("{found}{name}")));
        assert!(
            at("x.so").is_some() && at("deep/y.so").is_some(),
            "{target}"
        );
        assert!(s.0.children(at("sub").unwrap()).is_some(), "{target}");
        assert!(matches!(
            s.0.node(s.0.find(&path("lib")).unwrap()).kind,
            NodeKind::Leaf(Leaf::Symlink(_))
        ));
    }
}

#[test]
fn links_are_followed_through_links_and_into_lower_layers() {
    let mut s = Sketch::new();
    s.file("usr/lib/old", 1).layer();
    link(&mut s, "a", "b/lib");
    link(&mut s, "b", "/usr");
    s.file("a/new", 2);
    assert_eq!(s.list(), "a b usr/ usr/lib/ usr/lib/new usr/lib/old");
    s.0.put_link(&path("a/same"), &path("a/new")).unwrap();
    assert_eq!(
        s.0.find(&path("usr/lib/same")),
        s.0.find(&path("usr/lib/new"))
    );
    s.0.whiteout(&path("a/old"));
    assert_eq!(s.list(), "a b usr/ usr/lib/ usr/lib/new usr/lib/same");
    s.layer();
    link(&mut s, "c", "usr/lib");
    s.0.opaque(&path("c"));
    assert_eq!(s.list(), "a b c usr/ usr/lib/");
}

#[test]
fn a_directory_replaces_a_link_of_its_own_name() {
    let mut s = Sketch::new();
    link(&mut s, "l", "d");
    s.0.put_dir(&path("l"), Meta::default()).unwrap();
    s.file("l/x", 1);
    assert_eq!(s.list(), "l/ l/x");
}

#[test]
fn links_in_a_circle_and_without_end_are_refused() {
    let mut s = Sketch::new();
    link(&mut s, "a", "b");
    link(&mut s, "b", "a");
    link(&mut s, "self", "self/x");
    link(&mut s, "far", &"d/".repeat(256));
    link(&mut s, "l", &"n".repeat(256));
    for at in ["a/x", "b/x", "self/x", "far/x"] {
        let refused = s.0.put_leaf(&path(at), Meta::default(), file(7));
        assert!(matches!(refused, Err(TreeError::TooManyLinks(_))), "{at}");
        s.0.whiteout(&path(at));
    }
    let refused = s.0.put_leaf(&path("l/x"), Meta::default(), file(7));
    assert_eq!(refused, Err(TreeError::LinkTarget("l".into())));
    assert_eq!(s.list(), "a b far l self");
}

#[test]
fn an_entry_below_a_link_or_file_of_a_lower_layer_hides_that() {
    let mut s = Sketch::new();
    s.file("usr/lib/old", 1).file("f", 2);
    let link = Leaf::Symlink((*b"usr/lib").into());
    s.0.put_leaf(&path("lib"), Meta::default(), link).unwrap();
    s.layer().file("lib/new", 3).file("f/new", 4);
    assert_eq!(s.list(), "f/ f/new lib/ lib/new usr/ usr/lib/ usr/lib/old");
    assert_eq!(s.freed(), [2]);
}

#[test]
fn the_last_of_duplicate_entries_wins_whatever_the_kinds() {
    let mut s = Sketch::new();
    s.file("x/y", 1);
    s.file("x", 2);
    assert_eq!(s.list(), "x");
    assert_eq!(s.freed(), [1]);
    s.0.put_dir(
        &path("x"),
        Meta {
            mode: 0o700,
            ..Meta::default()
        },
    )
    .unwrap();
    assert_eq!(s.list(), "x/");
    assert_eq!(s.freed(), [2]);
    assert_eq!(s.0.node(s.0.find(&path("x")).unwrap()).meta.mode, 0o700);
}

#[test]
fn a_directory_that_comes_again_keeps_its_children_and_gets_new_metadata() {
    let mut s = Sketch::new();
    s.file("d/f", 1).layer();
    s.0.put_dir(
        &path("d"),
        Meta {
            mode: 0o1777,
            uid: 5,
            ..Meta::default()
        },
    )
    .unwrap();
    s.0.put_dir(
        &[],
        Meta {
            mode: 0o711,
            ..Meta::default()
        },
    )
    .unwrap();
    assert_eq!(s.list(), "d/ d/f");
    assert_eq!(s.0.node(s.0.find(&path("d")).unwrap()).meta.uid, 5);
    assert_eq!(s.0.node(Tree::ROOT).meta.mode, 0o711);
}

#[test]
fn an_opaque_directory_hides_lower_entries_in_each_layer_anew() {
    let mut s = Sketch::new();
    s.file("a/b/one", 1).layer().file("a/b/two", 2);
    s.0.opaque(&path("a"));
    s.0.opaque(&path("a"));
    assert_eq!(s.list(), "a/ a/b/ a/b/two");
    s.file("a/c/two", 3);
    s.0.opaque(&path("a"));
    assert_eq!(s.list(), "a/ a/b/ a/b/two a/c/ a/c/two");
    s.layer().file("a/b/three", 4);
    s.0.opaque(&path("a"));
    assert_eq!(s.list(), "a/ a/b/ a/b/three");
    assert_eq!(s.freed(), [1, 2, 3]);
}

#[test]
fn an_opaque_directory_below_one_that_is_made_opaque_later_leaves_its_neighbours_to_that() {
    let mut s = Sketch::new();
    s.file("a/b/old", 1).file("a/c/old", 2).layer();
    s.file("a/b/new", 3).file("a/c/new", 4);
    s.0.opaque(&path("a/b"));
    assert_eq!(s.list(), "a/ a/b/ a/b/new a/c/ a/c/new a/c/old");
    s.0.opaque(&path("a"));
    assert_eq!(s.list(), "a/ a/b/ a/b/new a/c/ a/c/new");
}

/// With work in proportion to the files for each whiteout, this takes hours.
#[test]
fn many_whiteouts_of_a_directory_with_many_files_of_the_same_layer_are_applied_soon() {
    const COUNT: u32 = 200_000;
    let mut s = Sketch::new();
    s.file("a/b/old", 0).layer();
    let names: Vec<_> = (0..COUNT).map(|at| format!("a/b/{at}")).collect();
    for name in &names {
        s.file(name, 1);
    }
    for _ in 0..COUNT {
        s.0.opaque(&path("a/b"));
        s.0.opaque(&path(""));
        s.0.whiteout(&path("a"));
    }
    assert_eq!(s.freed(), [0]);
    assert_eq!(s.0.len(), COUNT as usize + 3);
}

#[derive(Clone, Debug)]
enum Step {
    File(String),
    Dir(String),
    Whiteout(String),
    Opaque(String),
    Layer,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || "[ab](/[ab]){0,3}";
    prop_oneof![
        4 => at().prop_map(Step::File),
        2 => at().prop_map(Step::Dir),
        2 => at().prop_map(Step::Whiteout),
        3 => "|[ab](/[ab]){0,2}".prop_map(Step::Opaque),
        2 => Just(Step::Layer),
    ]
}

/// A tree as a list of paths, each with a file's mark and the last layer that named the path or
/// one below it.
#[derive(Default)]
struct Model {
    entries: BTreeMap<String, (Option<u32>, u32)>,
    layer: u32,
}

impl Model {
    fn put(&mut self, at: &str, mark: Option<u32>) {
        for (end, _) in at.match_indices('/') {
            if !self.make_dir(&at[..end], false) {
                return;
            }
        }
        if mark.is_none() {
            self.make_dir(at, true);
        } else {
            self.remove(at, |_| true);
            self.entries.insert(at.to_owned(), (mark, self.layer));
        }
    }

    fn make_dir(&mut self, at: &str, replace: bool) -> bool {
        let entry = self
            .entries
            .entry(at.to_owned())
            .or_insert((None, self.layer));
        let lower = std::mem::replace(&mut entry.1, self.layer) != self.layer;
        if lower || replace {
            entry.0 = None;
        }
        entry.0.is_none()
    }

    /// Removes what is below `at`, and has a layer that is to go.
    fn remove(&mut self, at: &str, goes: impl Fn(u32) -> bool) {
        let below = |path: &str| {
            let rest = path.strip_prefix(at);
            at.is_empty() || rest.is_some_and(|rest| rest.starts_with('/'))
        };
        self.entries
            .retain(|path, entry| !(below(path) && goes(entry.1)));
    }

    fn whiteout(&mut self, at: &str) {
        let layer = self.layer;
        if self.entries.get(at).is_some_and(|entry| entry.1 != layer) {
            self.entries.remove(at);
        }
        self.remove(at, |of| of != layer);
    }

    fn list(&self) -> String {
        let shown = self.entries.iter().map(|(path, (mark, _))| match mark {
            Some(_) => path.clone(),
            None => format!("{path}/"),
        });
        shown.collect::<Vec<_>>().join(" ")
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn whiteouts_hide_entries_of_lower_layers_only(steps in prop::collection::vec(step(), 0..40)) {
        let (mut s, mut model) = (Sketch::new(), Model::default());
        for (mark, step) in (0..).zip(&steps) {
            match step {
                Step::File(at) => {
                    let _ = s.0.put_leaf(&path(at), Meta::default(), file(mark));
                    model.put(at, Some(mark));
                }
                Step::Dir(at) => {
                    let _ = s.0.put_dir(&path(at), Meta::default());
                    model.put(at, None);
                }
                Step::Whiteout(at) => {
                    s.0.whiteout(&path(at));
                    model.whiteout(at);
                }
                Step::Opaque(at) => {
                    s.0.opaque(&path(at));
                    let layer = model.layer;
                    model.remove(at, |of| of != layer);
                }
                Step::Layer => {
                    s.layer();
                    model.layer += 1;
                }
            }
            prop_assert_eq!(s.list(), model.list());
        }
        let live: Vec<_> = model.entries.values().filter_map(|entry| entry.0).collect();
        let gone: Vec<u32> = (0..)
            .zip(&steps)
            .filter(|(mark, step)| matches!(step, Step::File(_)) && !live.contains(mark))
            .map(|(mark, _)| mark)
            .collect();
        prop_assert_eq!(s.freed(), gone);
    }
}
