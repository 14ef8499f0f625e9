package attacks

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// testsIn returns the names that match a pattern with one group in the Go test files of a directory.
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
// in the comment of this package. Each test or fuzz target that they name exists.
func TestThreatTable(t *testing.T) {
	t.Parallel()
	const functions, names = `(?m)^func ((?:Test|Fuzz)\w+)\(`, `\b((?:Test|Fuzz)[A-Z]\w+)`
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
	checkSubjects(t, regexp.MustCompile(names))
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

// checkSubjects checks that the list in the comment of this package has all subjects, each with a test.
func checkSubjects(t *testing.T, names *regexp.Regexp) {
	t.Helper()
	const subjects = 13
	raw, err := os.ReadFile("doc_test.go")
	if err != nil {
		t.Fatal(err)
	}
	number := regexp.MustCompile(`(?m)^// +(\d+)\. `)
	numbers, texts := number.FindAllStringSubmatch(string(raw), -1), number.Split(string(raw), -1)
	if len(numbers) != subjects {
		t.Errorf("the list of doc_test.go has %d subjects, want %d", len(numbers), subjects)
	}
	for i := range numbers {
		if got, want := numbers[i][1], strconv.Itoa(i+1); got != want {
			t.Errorf("the list of doc_test.go has number %s, want %s", got, want)
		}
		if !names.MatchString(texts[i+1]) {
			t.Errorf("the list of doc_test.go has no test for number %s", numbers[i][1])
		}
	}
}
