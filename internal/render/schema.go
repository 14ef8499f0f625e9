package render

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"

	"github.com/towline/towline/internal/phase"
)

// schemaURL is the URL of a values.schema.json, as in Helm.
const schemaURL = "file:///values.schema.json"

// checkSchemas returns an error if the values.schema.json of the chart or of a subchart is invalid or refers to another
// document. Helm would read this document from the network or from the files of this machine, so a chart could send
// requests to any host that the hub reaches.
func checkSchemas(loaded *helmchart.Chart) error {
	if err := checkSchema(loaded.Schema); err != nil {
		return phase.TerminalErrorf("values.schema.json of chart %s: %w", loaded.Name(), toOneLine(err))
	}
	for _, sub := range loaded.Dependencies() {
		if err := checkSchemas(sub); err != nil {
			return err
		}
	}
	return nil
}

// checkSchema compiles a schema as Helm does, but loads no other document. It also returns the errors of an invalid
// schema, since Helm could load documents before it finds the error.
func checkSchema(raw []byte) (err error) {
	if len(raw) == 0 {
		return nil
	}
	defer func() {
		if reason := recover(); reason != nil { // as Helm does
			err = fmt.Errorf("it cannot be compiled: %v", reason)
		}
	}()
	schema, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return err
	}
	loader := &schemaLoader{}
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(loader)
	if err := compiler.AddResource(schemaURL, schema); err != nil {
		return err
	}
	if _, err = compiler.Compile(schemaURL); loader.refused != "" {
		return fmt.Errorf("it refers to %s, and charts are rendered without a network and without files of the hub; "+
			"set options.skipSchemaValidation to render the chart without it", loader.refused)
	}
	return err
}

// schemaLoader loads no document. refused is the first URL that the compiler requested.
type schemaLoader struct{ refused string }

// Load implements jsonschema.URLLoader.
func (l *schemaLoader) Load(address string) (any, error) {
	if strings.HasPrefix(address, "urn:") {
		return true, nil // the schema that accepts everything, as in Helm
	}
	if l.refused == "" {
		l.refused = address
	}
	return nil, errors.New("not loaded")
}
