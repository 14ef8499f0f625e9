package cli

import "testing"

func TestLoadingAKubeconfigWritesNoFile(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"", "member1.config"} {
		if migrations := loadingRules(file).MigrationRules; len(migrations) > 0 {
			t.Errorf("file %q: loading would copy files: %v", file, migrations)
		}
	}
}
