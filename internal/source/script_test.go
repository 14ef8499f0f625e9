package source_test

import (
	"testing"
)

func TestRunScript(t *testing.T) {
	t.Parallel()
	got, err := contextWithResources().RunScript("text", `
function evaluate(all)
  local web = getResource(resources, "Web")
  return {resources = web.metadata.name .. web.spec.replicas .. getLabel(all.Web, "tier") .. tostring(all.Other)}
end`)
	if err != nil || got.Text != "web3frontnil" || !got.OnlyResources {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestRunScriptNamesThePlaceOfAnError(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"function evaluate()\n  return resources.None.metadata\nend": "run the text: invalid script: line 2: attempt to index",
		"x = ":                              "run the text: invalid script: at EOF:",
		"function other() end":              "run the text: invalid script: function evaluate is missing",
		"function evaluate() return {} end": "run the text: the field resources of the table that evaluate returns is not a text",
		"while true do end":                 "the script took ",
	} {
		tmplCtx := contextWithResources()
		tmplCtx.Resources.HasSecret = false
		_, err := tmplCtx.RunScript("the text", text)
		wantInvalid(t, err, want)
	}
	_, err := contextWithResources().RunScript("the text", `function evaluate() error(resources.Web.metadata.name) end`)
	wantInvalid(t, err, "run the text: the script failed (details are not shown, because the script can read a Secret)")
}
