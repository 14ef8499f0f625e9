package attacks

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// testsIn returns the names that match a pattern with one group in the Go files of tests in a directory.
func testsIn(t *testing.T, directory, name, pattern string) map[string]bool {
	t.Helper()
	found, expression := map[string]bool{}, regexp.MustCompile(pattern)
	err := filepath.WalkDir(directory, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, name) {
			return err
		}
		raw, err := os.ReadFile(path)
		for _, match := range expression.FindAllStringSubmatch(string(raw), -1) {
			found[match[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestThreatTable compares the tests of this package with those in the threat table of SECURITY.md, and with the list
// in the comment of this package. Each test that they name exists.
func TestThreatTable(t *testing.T) {
	t.Parallel()
	const functions, names = `(?m)^func (Test\w+)\(`, `\b(Test[A-Z]\w+)`
	raw, err := os.ReadFile("../../SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(raw), "\n## Threats\n")
	table, _, _ = strings.Cut(table, "\n## ")
	documented := map[string]bool{}
	for _, match := range regexp.MustCompile(names).FindAllStringSubmatch(table, -1) {
		documented[match[1]] = true
	}
	own, all := testsIn(t, ".", "_test.go", functions), testsIn(t, "../..", "_test.go", functions)
	listed := testsIn(t, ".", "doc_test.go", names)
	delete(own, "TestThreatTable")
	delete(own, "TestMain")
	for name := range own {
		if !documented[name] {
			t.Errorf("%s is not in the threat table of SECURITY.md", name)
		}
		if !listed[name] {
			t.Errorf("%s is not in the list of doc_test.go", name)
		}
	}
	for _, from := range []map[string]bool{documented, listed} {
		for name := range from {
			if !all[name] {
				t.Errorf("there is no test %s", name)
			}
		}
	}
}
